"""Values shared by all worker streams, to and from the wire. `codec_{target,draft,control}` build on it.

Decoding trusts nothing: a field that is missing or out of range raises `InvalidMessage`, which names it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from outrider.v1 import types_pb2 as pb
from specdec.candidates import TOKEN_ID_LIMIT, CandidateTree, DraftLaw, InvalidCandidates
from specdec.commit import FinishReason, TokenSource
from specdec.digest import DIGEST_BYTES
from specdec.messages import (
    Epoch,
    Failure,
    Header,
    NeedTokens,
    Refusal,
    RefusalReason,
    Role,
)
from specdec.params import StopConditions

log = logging.getLogger(__name__)

MessageT = TypeVar("MessageT", bound=Message)
Decoded = TypeVar("Decoded")

MAX_SEQUENCE_ID_BYTES = 256

MAX_DURATION = 315_576_000_000.0
"""Seconds that a protobuf Duration holds at most."""


class InvalidMessage(ValueError):
    """A message from the wire breaks the contract. `field` is its path in the item, e.g. `header.prefix_digest`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_SOURCES = {
    TokenSource.ACCEPTED: pb.TOKEN_SOURCE_ACCEPTED,
    TokenSource.CORRECTION: pb.TOKEN_SOURCE_CORRECTION,
    TokenSource.BONUS: pb.TOKEN_SOURCE_BONUS,
    TokenSource.PLAIN: pb.TOKEN_SOURCE_PLAIN,
}
_REASONS = {
    RefusalReason.EPOCH: pb.REFUSAL_REASON_EPOCH,
    RefusalReason.UNKNOWN_SEQUENCE: pb.REFUSAL_REASON_UNKNOWN_SEQUENCE,
    RefusalReason.INVALID: pb.REFUSAL_REASON_INVALID,
    RefusalReason.CAPACITY: pb.REFUSAL_REASON_CAPACITY,
    RefusalReason.DRAINING: pb.REFUSAL_REASON_DRAINING,
}
_ROLES = {Role.TARGET: pb.WORKER_ROLE_TARGET, Role.DRAFT: pb.WORKER_ROLE_DRAFT}

_FINISH_REASONS_BACK = {wire: reason for reason, wire in _FINISH_REASONS.items()}
_SOURCES_BACK = {wire: source for source, wire in _SOURCES.items()}
_REASONS_BACK = {wire: reason for reason, wire in _REASONS.items()}
_ROLES_BACK = {wire: role for role, wire in _ROLES.items()}


def split(messages: Iterable[MessageT], max_bytes: int) -> Iterator[list[MessageT]]:
    """Groups in order, each of about `max_bytes` at most; a larger single message is a group of its own."""
    group: list[MessageT] = []
    size = 0
    for message in messages:
        message_size = message.ByteSize()
        if group and size + message_size > max_bytes:
            yield group
            group, size = [], 0
        group.append(message)
        size += message_size
    if group:
        yield group


def require(message: Message, field: str, path: str) -> None:
    """Raises `InvalidMessage` unless the sub-message `field` is present."""
    if not message.HasField(field):
        raise InvalidMessage(f"{path}.{field}", "is missing")


def decode_each(
    messages: Iterable[Any],
    decode: Callable[[Any], Decoded],
    stand_in: Callable[[Header, InvalidMessage], Decoded | None],
) -> list[Decoded]:
    """Items or results of one message, in order. One that breaks the contract is replaced by its stand-in, if it has
    one; what does not even name a sequence is dropped."""
    decoded: list[Decoded] = []
    for message in messages:
        try:
            decoded.append(decode(message))
        except InvalidMessage as error:
            header = salvage_header(message.header)
            if header is None:
                log.warning("dropped what names no sequence: %s", error)
            elif (instead := stand_in(header, error)) is not None:
                decoded.append(instead)
    return decoded


def encode_duration(seconds: float) -> Duration:
    """Nanosecond resolution. Raises ValueError unless finite and within what a Duration holds."""
    duration = Duration()
    fill_duration(seconds, duration)
    return duration


def fill_duration(seconds: float, duration: Duration) -> None:
    """As `encode_duration`, in place."""
    if not math.isfinite(seconds) or abs(seconds) > MAX_DURATION:
        raise ValueError(f"a duration of {seconds} s cannot be sent")
    whole, nanos = divmod(round(abs(seconds) * 1e9), 10**9)
    duration.seconds, duration.nanos = (whole, nanos) if seconds >= 0 else (-whole, -nanos)


def decode_duration(duration: Duration, field: str, *, allow_negative: bool = False) -> float:
    """Seconds; an absent duration is 0."""
    if not -MAX_DURATION <= duration.seconds <= MAX_DURATION or not -(10**9) < duration.nanos < 10**9:
        raise InvalidMessage(field, "is no duration")
    seconds = (duration.seconds * 10**9 + duration.nanos) / 1e9
    if seconds < 0 and not allow_negative:
        raise InvalidMessage(field, f"is {seconds:g} s, must be 0 or more")
    return seconds


def decode_digest(digest: bytes, field: str) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidMessage(field, f"has {len(digest)} bytes, must have {DIGEST_BYTES}")
    return digest


def decode_token_ids(token_ids: Sequence[int], field: str) -> tuple[int, ...]:
    ids = tuple(token_ids[:])  # a slice is a list, which is faster to read than what protobuf has
    if ids and max(ids) >= TOKEN_ID_LIMIT:
        raise InvalidMessage(field, f"holds {max(ids)}, must be below {TOKEN_ID_LIMIT}")
    return ids


def encode_epoch(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(number=epoch.number, owner=epoch.owner)


def decode_epoch(epoch: pb.Epoch) -> Epoch:
    return Epoch(epoch.number, epoch.owner)


def encode_header(header: Header) -> pb.ItemHeader:
    message = pb.ItemHeader()
    fill_header(header, message)
    return message


def fill_header(header: Header, message: pb.ItemHeader) -> None:
    """As `encode_header`, in place: nothing is copied."""
    message.sequence_id = header.sequence_id
    message.base_length = header.base_length
    message.prefix_digest = header.prefix_digest
    epoch = message.epoch
    epoch.number, epoch.owner = header.epoch.number, header.epoch.owner
    if header.traceparent or header.tracestate:
        message.trace_context.traceparent = header.traceparent
        message.trace_context.tracestate = header.tracestate
    if header.time_remaining is not None:
        message.time_remaining.SetInParent()  # no time left is still a time
        fill_duration(header.time_remaining, message.time_remaining)


def decode_header(header: pb.ItemHeader) -> Header:
    """A negative `time_remaining` is legal: the deadline passed on the way."""
    sequence_id = header.sequence_id
    if not sequence_id:
        raise InvalidMessage("header.sequence_id", "is missing")
    if len(sequence_id) > MAX_SEQUENCE_ID_BYTES // 4 and len(sequence_id.encode()) > MAX_SEQUENCE_ID_BYTES:
        raise InvalidMessage("header.sequence_id", f"has more than {MAX_SEQUENCE_ID_BYTES} bytes")
    require(header, "epoch", "header")
    digest = decode_digest(header.prefix_digest, "header.prefix_digest")
    remaining = None
    if header.HasField("time_remaining"):
        remaining = decode_duration(header.time_remaining, "header.time_remaining", allow_negative=True)
    epoch = decode_epoch(header.epoch)
    if not header.HasField("trace_context"):
        return Header(sequence_id, epoch, header.base_length, digest, "", "", remaining)
    trace = header.trace_context
    return Header(sequence_id, epoch, header.base_length, digest, trace.traceparent, trace.tracestate, remaining)


def salvage_header(header: pb.ItemHeader) -> Header | None:
    """What is left of the header of a broken item, to answer it with; None if it does not even name its sequence."""
    if not header.sequence_id or len(header.sequence_id.encode()) > MAX_SEQUENCE_ID_BYTES:
        return None
    whole = len(header.prefix_digest) == DIGEST_BYTES
    digest = header.prefix_digest if whole else bytes(DIGEST_BYTES)
    return Header(header.sequence_id, decode_epoch(header.epoch), header.base_length, digest)


def encode_candidates(tree: CandidateTree, confidences: bool = False) -> pb.CandidateTree:
    message = pb.CandidateTree()
    fill_candidates(tree, message, confidences)
    return message


def fill_candidates(tree: CandidateTree, message: pb.CandidateTree, confidences: bool = False) -> None:
    """confidences: sent too, which only a scheduler has a use for."""
    message.token_ids.extend(tree.token_ids)
    message.parents.extend(tree.parents)
    for law in tree.laws:
        message.laws.add(token_ids=law.token_ids, weights=law.weights)
    if confidences:
        message.confidences.extend(tree.confidences)


def decode_candidates(message: pb.CandidateTree, field: str) -> CandidateTree:
    laws: tuple[DraftLaw, ...] = ()
    if message.laws:
        laws = tuple(DraftLaw(tuple(law.token_ids), tuple(law.weights)) for law in message.laws)
    # A slice is a list, which is faster to read than what protobuf has.
    tree = CandidateTree(tuple(message.token_ids[:]), tuple(message.parents[:]), laws, tuple(message.confidences[:]))
    try:
        tree.validate(TOKEN_ID_LIMIT)
        if laws:
            tree.validate_laws(TOKEN_ID_LIMIT)
    except InvalidCandidates as error:
        raise InvalidMessage(field, str(error)) from error
    return tree


def encode_stop(stop: StopConditions) -> pb.StopConditions:
    return pb.StopConditions(
        prompt_length=stop.prompt_length,
        max_length=stop.max_length,
        min_length=stop.min_length,
        stop_token_ids=sorted(stop.stop_token_ids),
    )


def decode_stop(message: pb.StopConditions, field: str) -> StopConditions:
    if message.max_length < message.prompt_length:
        problem = f"is {message.max_length}, must be at least prompt_length ({message.prompt_length})"
        raise InvalidMessage(f"{field}.max_length", problem)
    ids = decode_token_ids(message.stop_token_ids, f"{field}.stop_token_ids")
    return StopConditions(message.prompt_length, message.max_length, message.min_length, frozenset(ids))


def encode_sources(sources: Iterable[TokenSource]) -> list[pb.TokenSource.ValueType]:
    return [_SOURCES[source] for source in sources]


def decode_sources(sources: Sequence[pb.TokenSource.ValueType], field: str) -> tuple[TokenSource, ...]:
    try:
        return tuple([_SOURCES_BACK[source] for source in sources[:]])
    except KeyError:
        i, source = next((i, source) for i, source in enumerate(sources) if source not in _SOURCES_BACK)
        raise InvalidMessage(f"{field}[{i}]", f"is {source}, which is no source of a token") from None


def encode_finish_reason(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def decode_finish_reason(reason: pb.FinishReason.ValueType, field: str) -> FinishReason | None:
    """None: not finished."""
    if reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    if reason not in _FINISH_REASONS_BACK:
        raise InvalidMessage(field, f"is {reason}, which is no reason to finish")
    return _FINISH_REASONS_BACK[reason]


def encode_role(role: Role) -> pb.WorkerRole.ValueType:
    return _ROLES[role]


def decode_role(role: pb.WorkerRole.ValueType, field: str) -> Role:
    if role not in _ROLES_BACK:
        raise InvalidMessage(field, f"is {role}, which is no role")
    return _ROLES_BACK[role]


def encode_refusal(refusal: Refusal) -> pb.Refusal:
    message = pb.Refusal(reason=_REASONS[refusal.reason], message=refusal.message)
    if refusal.held_epoch is not None:
        message.held_epoch.CopyFrom(encode_epoch(refusal.held_epoch))
    return message


def decode_refusal(message: pb.Refusal, field: str) -> Refusal:
    if message.reason not in _REASONS_BACK:
        raise InvalidMessage(f"{field}.reason", f"is {message.reason}, which is no reason to refuse")
    held = decode_epoch(message.held_epoch) if message.HasField("held_epoch") else None
    return Refusal(_REASONS_BACK[message.reason], message.message, held)


def encode_failure(failure: Failure) -> pb.Failure:
    return pb.Failure(message=failure.message)


def encode_need_tokens(need: NeedTokens) -> pb.NeedTokens:
    return pb.NeedTokens(have_length=need.have_length)
