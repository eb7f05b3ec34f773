"""What may be asked of a server, and how it is put on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from outrider.chat import encode_chat
from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2 as types

Value = TypeVar("Value")

SpeculationMode = Literal["auto", "on", "off"]
AcceptRule = Literal["invariant", "rejection", "block"]
LogprobsOf = Literal["raw", "processed"]

_MODES: dict[str, pb.SpeculationMode.ValueType] = {
    "auto": pb.SPECULATION_MODE_AUTO,
    "on": pb.SPECULATION_MODE_ON,
    "off": pb.SPECULATION_MODE_OFF,
}
_RULES: dict[str | None, types.AcceptRule.ValueType] = {
    None: types.ACCEPT_RULE_UNSPECIFIED,
    "invariant": types.ACCEPT_RULE_INVARIANT,
    "rejection": types.ACCEPT_RULE_REJECTION,
    "block": types.ACCEPT_RULE_BLOCK,
}
_LAWS: dict[str, types.LogprobsOf.ValueType] = {
    "raw": types.LOGPROBS_OF_RAW,
    "processed": types.LOGPROBS_OF_PROCESSED,
}
_NUMBERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "top_logprobs",
    "draft_length",
)
_GRAMMARS = ("json_schema", "json_object", "regex", "choice", "lark")


class GenerateOptions(TypedDict, total=False):
    """What is left out, or None, has the server's default: temperature 1, top_p 1, a random seed, all of the context.

    messages, token_ids: instead of a text prompt; messages have `role` and `content`, and as in OpenAI's API
    `tool_calls`, `tool_call_id` and `name`. tools: OpenAI's tool definitions, for messages. model: empty is the only
    one served. stop: texts before which the answer ends. stop_token_ids: beside those of the model, which ignore_eos
    leaves out. logit_bias: by token id, in [-100, 100]. bad_words: texts that the answer must not hold;
    bad_word_ids: the same as token ids. n: choices.
    top_logprobs: 0 tells those of the answer's own tokens. echo: the answer begins with the prompt.

    At most one of json_schema (JSON text, or the schema as a mapping), json_object, regex, choice and lark (a grammar
    in llguidance's dialect) says what the answer must match. timeout: seconds for the whole call.

    traceparent, tracestate: W3C trace context that the call belongs to; empty: what the program's OpenTelemetry says.
    """

    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]]
    token_ids: Sequence[int] | None
    model: str
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    bad_word_ids: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    seed: int | None
    n: int | None
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    top_logprobs: int | None
    logprobs_of: LogprobsOf
    echo: bool
    accept_rule: AcceptRule | None
    json_schema: str | Mapping[str, Any] | None
    json_object: bool
    regex: str | None
    choice: Sequence[str] | None
    lark: str | None
    speculation: SpeculationMode
    draft_length: int | None
    request_id: str
    timeout: float | None
    traceparent: str
    tracestate: str


def encode_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """Raises InvalidRequest for what cannot travel; ranges are judged by the server."""
    unknown = set(options) - set(GenerateOptions.__annotations__)
    if unknown:
        raise TypeError(f"generate() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    stop = options.get("stop", ())
    message = pb.GenerateRequest(
        model=options.get("model", ""),
        ignore_eos=options.get("ignore_eos", False),
        speculation=_word("speculation", options.get("speculation", "auto"), _MODES),
        request_id=options.get("request_id", ""),
        bad_words=options.get("bad_words", ()),
        stop=[stop] if isinstance(stop, str) else stop,
        include_stop_str_in_output=options.get("include_stop_str_in_output", False),
        logprobs_of=_word("logprobs_of", options.get("logprobs_of", "raw"), _LAWS),
        echo=options.get("echo", False),
        accept_rule=_word("accept_rule", options.get("accept_rule"), _RULES),
    )
    _set_prompt(message, prompt, options)
    _set_grammar(message, options)
    message.stop_token_ids.extend(_token_ids("stop_token_ids", options.get("stop_token_ids", ())))
    message.allowed_token_ids.extend(_token_ids("allowed_token_ids", options.get("allowed_token_ids", ())))
    for word in options.get("bad_word_ids", ()):
        message.bad_word_ids.add(token_ids=_token_ids("bad_word_ids", word))
    logit_bias = options.get("logit_bias", {})
    for token_id, bias in zip(_token_ids("logit_bias", list(logit_bias)), logit_bias.values(), strict=True):
        message.logit_bias.add(token_id=token_id, bias=bias)
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
    if options.get("tools") and messages is None:
        raise InvalidRequest("tools are for messages, and there are none", field="tools")
    if prompt is not None:
        message.text = prompt
    elif messages is not None:
        encode_chat(message.chat, messages, options.get("tools", ()))
    elif token_ids is not None:
        message.tokens.SetInParent()
        message.tokens.token_ids.extend(_token_ids("token_ids", token_ids))


def _set_grammar(message: pb.GenerateRequest, options: GenerateOptions) -> None:
    values: Mapping[str, Any] = {**options}
    given = [name for name in _GRAMMARS if values.get(name) not in (None, False)]
    if len(given) > 1:
        raise InvalidRequest(
            f"give at most one of {', '.join(_GRAMMARS)} ({' and '.join(given)} given)", field="grammar"
        )
    for name in given:
        value = values[name]
        if name == "choice":
            message.grammar.choice.texts.extend(value)
        else:
            text = json.dumps(value) if name == "json_schema" and not isinstance(value, str) else value
            setattr(message.grammar, name, text)


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


def _word(field: str, word: str | None, values: Mapping[Any, Value]) -> Value:
    if word not in values:
        *words, last = [name for name in values if name is not None]
        raise InvalidRequest(f"{field} is {word!r}, must be {', '.join(words)} or {last}", field=field)
    return values[word]
