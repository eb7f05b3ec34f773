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
from services.generation import UserRequest
from specdec.candidates import MAX_CANDIDATES
from specdec.params import SEED_LIMIT, SamplingParams

MAX_STOP_TOKEN_IDS = 1024
MAX_REQUEST_ID_CHARACTERS = 256
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MAX_TRACESTATE_CHARACTERS = 512


def float32(value: float) -> float:
    """The nearest float32 as a Python float; values beyond its range are returned as they are, to be refused."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return value


def sampling_of(request: UserRequest, random_seed: Callable[[], int] = lambda: secrets.randbits(64)) -> SamplingParams:
    """Every default resolved: temperature 1, top_p 1, top_k and min_p off, a random seed. Raises InvalidRequest."""
    sampling = SamplingParams(
        temperature=float32(1.0 if request.temperature is None else request.temperature),
        top_k=request.top_k or 0,
        top_p=float32(1.0 if request.top_p is None else request.top_p),
        min_p=float32(request.min_p or 0.0),
        seed=random_seed() if request.seed is None else request.seed,
    )
    try:
        sampling.validate()
    except ValueError as error:
        message = str(error)
        raise InvalidRequest(message.split(" ", 1)[0], message) from None  # the message begins with the field
    if sampling.top_k >= 2**31:
        raise InvalidRequest("top_k", f"top_k is {sampling.top_k}, must be in [0, 2^31)")
    return sampling


def check_numbers(request: UserRequest) -> None:
    """Fields that need no model to be judged. Raises InvalidRequest."""
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
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest(
            "request_id",
            f"request_id has {len(request.request_id)} characters, must have at most {MAX_REQUEST_ID_CHARACTERS}",
        )
    if request.seed is not None and not 0 <= request.seed < SEED_LIMIT:
        raise InvalidRequest("seed", f"seed is {request.seed}, must be in [0, 2^64)")


def check_stop_token_ids(token_ids: tuple[int, ...], vocabulary_size: int) -> None:
    """Raises InvalidRequest."""
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"stop_token_ids has {len(token_ids)} ids, must have at most {MAX_STOP_TOKEN_IDS}"
        )
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                "stop_token_ids", f"stop_token_ids[{index}] is {token_id}, must be in [0, {vocabulary_size})"
            )


def trace_context_of(traceparent: str, tracestate: str) -> tuple[str, str]:
    """What is no trace context is dropped, as the standard asks, not refused."""
    if not TRACEPARENT.fullmatch(traceparent):
        return "", ""
    return traceparent, tracestate if len(tracestate) <= MAX_TRACESTATE_CHARACTERS else ""
