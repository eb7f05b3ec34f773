"""From a body and its headers to what the gateway is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scheduler.request import Speculation
from services.generation import Prompt, UserRequest
from services.http.bodies import MAX_CHOICES, GenerationBody
from services.http.chat_body import ChatBody
from services.http.completion_body import DEFAULT_MAX_TOKENS, CompletionBody
from services.http.errors import bad_request
from services.http.grammars import grammar_of, tool_call_grammar
from services.tools import CLOSE
from specdec.params import AcceptRule, LogprobsOf

HEADERS = {
    "speculation": tuple(mode.value for mode in Speculation),
    "accept_rule": tuple(rule.value for rule in AcceptRule),
}
"""Fields that may also come as headers, for clients that cannot add to the body."""


@dataclass(frozen=True, slots=True)
class Asked:
    """requests: one per prompt. names: what a field of the gateway is called in the body, where it differs."""

    requests: tuple[UserRequest, ...]
    names: dict[str, str] = field(default_factory=dict)

    @property
    def choices_per_prompt(self) -> int:
        return self.requests[0].n or 1


def ask_completion(body: CompletionBody, headers: Mapping[str, str]) -> Asked:
    """Raises HttpError."""
    names = {"top_logprobs": "logprobs"}
    prompts = body.prompts()
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        text = f"{len(prompts)} prompts with {body.n} choices each are too many, must be {MAX_CHOICES} choices at most"
        raise bad_request("n", f"n: {text}")
    request = replace(
        _request(body, headers, prompts[0]),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        echo=bool(body.echo),
        top_logprobs=body.logprobs,
    )
    wanted = grammar_of(body)
    if wanted is not None:
        names["grammar"], grammar = wanted
        request = replace(request, grammar=grammar)
    return Asked(tuple(replace(request, prompt=prompt) for prompt in prompts), names)


def ask_chat(body: ChatBody, headers: Mapping[str, str], marks_are_tokens: bool = False) -> Asked:
    """marks_are_tokens: as `tool_call_grammar` wants to know it. Raises HttpError."""
    newer = body.max_completion_tokens is not None
    names = {"prompt": "messages"} | ({"max_tokens": "max_completion_tokens"} if newer else {})
    request = replace(
        _request(body, headers, body.prompt()),
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    one_call = body.parallel_tool_calls is False and bool(body.tools_in_use)
    forced = body.forced_tools
    call = tool_call_grammar(forced, not one_call, marks_are_tokens) if forced else None
    wanted = grammar_of(body, call)
    if wanted is not None:
        names["grammar"], grammar = wanted
        if body.tools_in_use and not forced:
            text = "leaves no room for calls: leave tools out or give tool_choice none"
            raise bad_request(names["grammar"], f"{names['grammar']} {text}")
        request = replace(request, grammar=grammar)
    elif one_call:
        request = replace(request, stop=(*request.stop, CLOSE))  # the answer ends behind its first call
    return Asked((request,), names)


def _request(body: GenerationBody, headers: Mapping[str, str], prompt: Prompt) -> UserRequest:
    speculation = _choice("speculation", body.speculation, headers)
    accept_rule = _choice("accept_rule", body.accept_rule, headers)
    return UserRequest(
        prompt=prompt,
        model=body.model or "",
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(body.top_k, 0) if body.top_k is not None else None,
        top_p=body.top_p,
        min_p=body.min_p,
        typical_p=body.typical_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=_allowed(body.allowed_token_ids),
        seed=body.seed,
        n=body.n,
        stop=tuple(body.stop or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs_of=LogprobsOf(body.logprobs_of) if body.logprobs_of else None,
        accept_rule=AcceptRule(accept_rule) if accept_rule else None,
        speculation=Speculation(speculation) if speculation else Speculation.AUTO,
        draft_length=_draft_length(body.draft_length, headers),
        request_id=body.request_id or headers.get("x-request-id", ""),
        traceparent=headers.get("traceparent", ""),
        tracestate=headers.get("tracestate", ""),
    )


def _choice(name: str, given: str | None, headers: Mapping[str, str]) -> str | None:
    header = _header(name, headers)
    if header is None:
        return given
    allowed = HEADERS[name]
    value = header.strip().lower()
    if value not in allowed:
        raise bad_request(name, f"the header {name} is {json.dumps(header)}, must be {' or '.join(allowed)}")
    _refuse_contradiction(name, given, value)
    return value


def _draft_length(given: int | None, headers: Mapping[str, str]) -> int | None:
    header = _header("draft_length", headers)
    if header is None:
        return given
    if not (header.isascii() and header.isdecimal() and len(header) < 10):
        raise bad_request("draft_length", f"the header draft_length is {json.dumps(header)}, must be a whole number")
    _refuse_contradiction("draft_length", given, int(header))
    return int(header)


def _header(name: str, headers: Mapping[str, str]) -> str | None:
    """Proxies drop names with underscores, so a hyphen does as well."""
    return headers.get(name.replace("_", "-"), headers.get(name))


def _refuse_contradiction(name: str, given: object, header: object) -> None:
    if given is not None and given != header:
        raise bad_request(name, f"{name} is {given} in the body and {header} in the header: give one")


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """By token id, each once. Raises HttpError."""
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad_request("logit_bias", f"logit_bias: {json.dumps(key[:40])} is no token id")
        if biases.setdefault(int(key), bias) != bias:
            raise bad_request("logit_bias", f"logit_bias: token {int(key)} is there twice")
    return tuple(sorted(biases.items()))


def _allowed(given: list[int] | None) -> tuple[int, ...]:
    """An empty list would allow nothing, and the gateway reads it as all."""
    if given is not None and not given:
        raise bad_request("allowed_token_ids", "allowed_token_ids is empty, must hold at least one token id")
    return tuple(given or ())
