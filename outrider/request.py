"""What may be asked of a server, and how it is put on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb

SpeculationMode = Literal["auto", "on", "off"]

_MODES: dict[str, pb.SpeculationMode.ValueType] = {
    "auto": pb.SPECULATION_MODE_AUTO,
    "on": pb.SPECULATION_MODE_ON,
    "off": pb.SPECULATION_MODE_OFF,
}
_NUMBERS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "draft_length")


class GenerateOptions(TypedDict, total=False):
    """What is left out, or None, has the server's default: temperature 1, top_p 1, a random seed, all of the context.

    messages, token_ids: instead of a text prompt; messages have `role` and `content`. model: empty is the only one
    served. stop_token_ids: beside those of the model, which ignore_eos leaves out. timeout: seconds for the whole call.
    """

    messages: Sequence[Mapping[str, str]] | None
    token_ids: Sequence[int] | None
    model: str
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    speculation: SpeculationMode
    draft_length: int | None
    request_id: str
    timeout: float | None


def encode_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises InvalidRequest for what cannot travel; ranges are judged by the server."""
    unknown = set(options) - set(GenerateOptions.__annotations__)
    if unknown:
        raise TypeError(f"generate() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    message = pb.GenerateRequest(
        model=options.get("model", ""),
        ignore_eos=options.get("ignore_eos", False),
        speculation=_mode(options.get("speculation", "auto")),
        request_id=options.get("request_id", ""),
    )
    _set_prompt(message, prompt, options)
    message.stop_token_ids.extend(_token_ids("stop_token_ids", options.get("stop_token_ids", ())))
    values: Mapping[str, object] = {**options}
    for field in _NUMBERS:
        value = values.get(field)
        if value is not None:
            _set_number(message, field, value)
    return message


def _set_prompt(message: pb.GenerateRequest, prompt: str | None, options: GenerateOptions) -> None:
    messages, token_ids = options.get("messages"), options.get("token_ids")
    candidates = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
    given = [name for name, value in candidates.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"give exactly one of prompt, messages and token_ids ({' and '.join(given) or 'none'} given)",
            field="prompt",
        )
    if prompt is not None:
        message.text = prompt
    elif messages is not None:
        message.chat.SetInParent()
        for index, one in enumerate(messages):
            if not {"role", "content"} <= one.keys():
                raise InvalidRequest(f"messages[{index}] must have role and content", field="messages")
            message.chat.messages.add(role=one["role"], content=one["content"])
    elif token_ids is not None:
        message.tokens.SetInParent()
        message.tokens.token_ids.extend(_token_ids("token_ids", token_ids))


def _set_number(message: pb.GenerateRequest, field: str, value: object) -> None:
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        bits = 64 if field == "seed" else 32
        raise InvalidRequest(f"{field} is {value!r}, must be a number in [0, 2^{bits})", field=field) from error


def _token_ids(field: str, token_ids: Sequence[int]) -> Sequence[int]:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < 2**32:
            raise InvalidRequest(f"{field}[{index}] is {token_id}, must be in [0, 2^32)", field=field)
    return token_ids


def _mode(mode: str) -> pb.SpeculationMode.ValueType:
    if mode not in _MODES:
        raise InvalidRequest(f"speculation is {mode!r}, must be auto, on or off", field="speculation")
    return _MODES[mode]
