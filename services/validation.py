"""The allowed range of every field of a request. What is refused is named as in the API, with the range.

Floats are rounded to float32 here, once, whatever API they came by: that is what travels to both workers, and 0.8 must
be the same temperature over gRPC (float32) as over HTTP (float64).
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Callable

from scheduler.errors import InvalidRequest
from services.generation import ChatPrompt, UserRequest
from specdec.candidates import MAX_CANDIDATES
from specdec.params import MAX_TOP_LOGPROBS, SEED_LIMIT, AcceptRule, SamplingParams, StopConditions

MAX_STOP_TOKEN_IDS = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_IDS = 2 * MAX_BAD_WORDS
"""A word as text becomes up to two sequences of token ids."""
MAX_CHOICES = 128
MAX_GRAMMAR_CHARACTERS = 2**18
MAX_REQUEST_ID_CHARACTERS = 256
MIN_REPETITION_PENALTY = 0.01
"""Dividing by less would take a logit beyond float32."""
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MAX_TRACESTATE_CHARACTERS = 512

_RANGES = {
    "n": (1, MAX_CHOICES),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "top_k": (0, 2**31 - 1),
}


def float32(value: float) -> float:
    """The nearest float32 as a Python float; values beyond its range are returned as they are, to be refused."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return value


def check_request(request: UserRequest, accept_rule: AcceptRule) -> None:
    """What needs no model to be judged. accept_rule: the one that holds. Raises InvalidRequest."""
    _check_numbers(request)
    _check_texts(request)
    _check_combinations(request, accept_rule)


def sampling_of(
    request: UserRequest,
    accept_rule: AcceptRule = AcceptRule.INVARIANT,
    random_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> SamplingParams:
    """Every default resolved: temperature 1, top_p 1, all else off, a random seed. Raises InvalidRequest.

    `bad_words` are left out: they need a tokenizer.
    """
    sampling = SamplingParams(
        temperature=_float(request.temperature, 1.0),
        top_k=request.top_k or 0,
        top_p=_float(request.top_p, 1.0),
        min_p=_float(request.min_p, 0.0),
        seed=random_seed() if request.seed is None else request.seed,
        typical_p=_float(request.typical_p, 1.0),
        repetition_penalty=_float(request.repetition_penalty, 1.0),
        presence_penalty=_float(request.presence_penalty, 0.0),
        frequency_penalty=_float(request.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((token_id, float32(bias)) for token_id, bias in request.logit_bias)),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids))),
        accept_rule=accept_rule,
        grammar=request.grammar,
    )
    try:
        sampling.validate()
    except ValueError as error:
        message = str(error)
        raise InvalidRequest(message.split(" ", 1)[0], message) from None  # the message begins with the field
    if sampling.repetition_penalty < float32(MIN_REPETITION_PENALTY):
        value = f"{sampling.repetition_penalty:g}"
        raise InvalidRequest("repetition_penalty", f"repetition_penalty is {value}, must be in [0.01, 100]")
    return sampling


def check_token_ids(request: UserRequest, vocabulary_size: int) -> None:
    """Token ids that a field names. Raises InvalidRequest."""
    named = {
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.allowed_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in request.logit_bias),
        **{f"bad_word_ids[{index}]": word for index, word in enumerate(request.bad_word_ids)},
    }
    for field, token_ids in named.items():
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocabulary_size:
                name = field.split("[")[0]
                raise InvalidRequest(name, f"{field}[{index}] is {token_id}, must be in [0, {vocabulary_size})")


def check_something_left(sampling: SamplingParams, stop: StopConditions, vocabulary_size: int) -> None:
    """Some token can be drawn at every position, whatever was drawn before. Raises InvalidRequest."""
    forbidden = {word[-1] for word in sampling.bad_words}
    if stop.min_length > stop.prompt_length:
        forbidden |= stop.stop_token_ids
    allowed = set(sampling.allowed_token_ids)
    if allowed and not allowed - forbidden:
        raise InvalidRequest(
            "allowed_token_ids",
            "allowed_token_ids must hold one with which no bad word ends and, with min_tokens, that is no stop token",
        )
    if not allowed and len(forbidden) >= vocabulary_size:
        raise InvalidRequest("bad_words", f"bad_words must leave some of the {vocabulary_size} tokens to draw")


def trace_context_of(traceparent: str, tracestate: str) -> tuple[str, str]:
    """What is no trace context is dropped, as the standard asks, not refused."""
    if not TRACEPARENT.fullmatch(traceparent):
        return "", ""
    return traceparent, tracestate if len(tracestate) <= MAX_TRACESTATE_CHARACTERS else ""


def _float(value: float | None, default: float) -> float:
    return float32(default if value is None else value)


def _check_numbers(request: UserRequest) -> None:
    for field, (low, high) in _RANGES.items():
        value = getattr(request, field)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(field, f"{field} is {value}, must be in [{low}, {high}]")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest(
            "max_tokens",
            f"max_tokens is {request.max_tokens}, must be 1 or more; leave it out for what is left of the context",
        )
    min_tokens = request.min_tokens or 0
    if min_tokens < 0:
        raise InvalidRequest("min_tokens", f"min_tokens is {min_tokens}, must be 0 or more")
    if request.max_tokens is not None and min_tokens > request.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"min_tokens is {min_tokens}, must be at most max_tokens, which is {request.max_tokens}"
        )
    if request.draft_length is not None and not 1 <= request.draft_length <= MAX_CANDIDATES:
        raise InvalidRequest(
            "draft_length",
            f"draft_length is {request.draft_length}, must be in [1, {MAX_CANDIDATES}]; "
            "to decode plainly set speculation to off",
        )
    if request.seed is not None and not 0 <= request.seed < SEED_LIMIT:
        raise InvalidRequest("seed", f"seed is {request.seed}, must be in [0, 2^64)")
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        count = len(request.stop_token_ids)
        raise InvalidRequest(
            "stop_token_ids", f"stop_token_ids has {count} ids, must have at most {MAX_STOP_TOKEN_IDS}"
        )
    biased = [token_id for token_id, _ in request.logit_bias]
    if len(set(biased)) < len(biased):
        raise InvalidRequest("logit_bias", "logit_bias names a token twice, must have one bias for each")


def _check_texts(request: UserRequest) -> None:
    _check_list("stop", request.stop, MAX_STOPS, MAX_STOP_CHARACTERS)
    _check_list("bad_words", request.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    if len(request.bad_word_ids) > MAX_BAD_WORD_IDS or not all(request.bad_word_ids):
        raise InvalidRequest(
            "bad_word_ids",
            f"bad_word_ids has {len(request.bad_word_ids)} words, must have at most {MAX_BAD_WORD_IDS}, none of them "
            "empty",
        )
    _check_text("request_id", request.request_id, MAX_REQUEST_ID_CHARACTERS)
    if request.grammar is not None:
        _check_text("grammar", request.grammar.text, MAX_GRAMMAR_CHARACTERS)


def _check_list(field: str, texts: tuple[str, ...], count: int, characters: int) -> None:
    if len(texts) > count:
        raise InvalidRequest(field, f"{field} has {len(texts)} texts, must have at most {count}")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(field, f"{field}[{index}] is empty, must have at least one character")
        _check_text(field, text, characters, f"{field}[{index}]")


def _check_text(field: str, text: str, characters: int, path: str = "") -> None:
    path = path or field
    if len(text) > characters:
        raise InvalidRequest(field, f"{path} has {len(text)} characters, must have at most {characters}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, f"{path} holds half a surrogate pair, must be valid Unicode") from None


def _check_combinations(request: UserRequest, accept_rule: AcceptRule) -> None:
    """Fields that another one makes impossible to honour."""
    if request.seed is not None and accept_rule is not AcceptRule.INVARIANT:
        raise InvalidRequest(
            "seed",
            f"seed must be left out with accept_rule {accept_rule.value}: the text would depend on what was drafted; "
            "accept_rule invariant takes a seed",
        )
    if request.echo and isinstance(request.prompt, ChatPrompt):
        raise InvalidRequest("echo", "echo must be false with messages: it repeats a prompt of text or token ids")
    if request.echo and request.top_logprobs is not None:
        raise InvalidRequest("echo", "echo must be false with logprobs: the prompt's own are not computed")
    if request.grammar is None:
        return
    for field in ("ignore_eos", "min_tokens", "bad_words", "bad_word_ids", "allowed_token_ids"):
        if getattr(request, field):
            raise InvalidRequest(
                field, f"{field} must be left out with a grammar: the answer could neither end nor go on where it must"
            )
