"""The target worker's messages to and from the wire.

Items and results travel in batches. One that breaks the contract is answered alone; its neighbours are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.v1 import target_service_pb2 as pb
from services import codec, codec_sampling
from services.codec import InvalidMessage
from specdec.messages import (
    Committed,
    Failure,
    Grant,
    Header,
    NeedTokens,
    Opened,
    Prefilled,
    Refusal,
    RefusalReason,
    Release,
    Released,
    StaleBlock,
    TargetItem,
    TargetOpen,
    TargetResult,
    VerifyBlock,
)

ResultBody = Opened | Prefilled | Committed | StaleBlock | NeedTokens | Refusal | Failure | Released


# scheduler -> target worker


def encode_item(item: TargetItem) -> pb.VerifyItem:
    """Raises ValueError if a number does not fit the wire."""
    message = pb.VerifyItem()
    fill_item(item, message)
    return message


def fill_item(item: TargetItem, message: pb.VerifyItem) -> None:
    """As `encode_item`, in place."""
    codec.fill_header(item.header, message.header)
    body = item.body
    if isinstance(body, VerifyBlock):
        verify = message.verify
        codec.fill_candidates(body.candidates, verify.candidates)
        _fill_grant(body.grant, verify.grant)
    elif isinstance(body, TargetOpen):
        message.open.CopyFrom(_encode_open(body))
    else:
        message.release.SetInParent()


def decode_item(item: pb.VerifyItem) -> TargetItem:
    """Raises InvalidMessage."""
    header = codec.decode_header(item.header)
    kind = item.WhichOneof("kind")
    if kind == "verify":
        codec.require(item.verify, "grant", "verify")
        candidates = codec.decode_candidates(item.verify.candidates, "verify.candidates")
        return TargetItem(header, VerifyBlock(candidates, _decode_grant(item.verify.grant, "verify.grant")))
    if kind == "open":
        return TargetItem(header, _decode_open(item.open, header.base_length))
    if kind == "release":
        return TargetItem(header, Release())
    raise InvalidMessage("kind", "is missing")


def decode_items(items: Iterable[pb.VerifyItem]) -> tuple[list[TargetItem], list[TargetResult]]:
    """The items that keep the contract, and a refusal for each one that does not."""
    refusals: list[TargetResult] = []

    def refuse(header: Header, error: InvalidMessage) -> None:
        refusals.append(TargetResult(header, Refusal(RefusalReason.INVALID, str(error))))

    return codec.decode_each(items, decode_item, refuse), refusals


def _encode_grant(grant: Grant) -> pb.Grant:
    message = pb.Grant()
    _fill_grant(grant, message)
    return message


def _fill_grant(grant: Grant, message: pb.Grant) -> None:
    message.until_length = grant.until_length
    codec.fill_duration(grant.patience, message.patience)


def _decode_grant(grant: pb.Grant, field: str) -> Grant:
    return Grant(grant.until_length, codec.decode_duration(grant.patience, f"{field}.patience"))


def _encode_open(body: TargetOpen) -> pb.TargetOpen:
    return pb.TargetOpen(
        token_ids=body.token_ids,
        sampling=codec_sampling.encode_sampling(body.sampling),
        stop=codec.encode_stop(body.stop),
        grant=_encode_grant(body.grant),
        root_digest=body.root_digest,
        report=codec_sampling.encode_report(body.report),
    )


def _decode_open(message: pb.TargetOpen, base_length: int) -> TargetOpen:
    for field in ("sampling", "stop", "grant"):
        codec.require(message, field, "open")
    token_ids = codec.decode_token_ids(message.token_ids, "open.token_ids")
    if not token_ids:
        raise InvalidMessage("open.token_ids", "is empty, must hold at least one token")
    if len(token_ids) != base_length:
        raise InvalidMessage("header.base_length", f"is {base_length}, but open.token_ids holds {len(token_ids)}")
    return TargetOpen(
        token_ids,
        codec_sampling.decode_sampling(message.sampling, "open.sampling"),
        codec.decode_stop(message.stop, "open.stop"),
        _decode_grant(message.grant, "open.grant"),
        codec.decode_digest(message.root_digest, "open.root_digest"),
        codec_sampling.decode_report(message.report, "open.report"),
    )


# target worker -> scheduler


def encode_result(result: TargetResult) -> pb.VerifyResult:
    """Raises ValueError if a number does not fit the wire."""
    header = codec.encode_header(result.header)
    body = result.body
    if isinstance(body, Committed):
        return pb.VerifyResult(header=header, committed=_encode_committed(body))
    if isinstance(body, Opened):
        return pb.VerifyResult(header=header, opened=pb.Opened(cached_length=body.cached_length))
    if isinstance(body, Prefilled):
        return pb.VerifyResult(header=header, prefilled=pb.Prefilled(length=body.length))
    if isinstance(body, StaleBlock):
        return pb.VerifyResult(header=header, stale=pb.StaleBlock(log_length=body.log_length))
    if isinstance(body, NeedTokens):
        return pb.VerifyResult(header=header, need_tokens=codec.encode_need_tokens(body))
    if isinstance(body, Refusal):
        return pb.VerifyResult(header=header, refusal=codec.encode_refusal(body))
    if isinstance(body, Failure):
        return pb.VerifyResult(header=header, failure=codec.encode_failure(body))
    return pb.VerifyResult(header=header, released=pb.Released())


def decode_result(result: pb.VerifyResult) -> TargetResult:
    """Raises InvalidMessage."""
    return TargetResult(codec.decode_header(result.header), _decode_result_body(result))


def decode_results(results: Sequence[pb.VerifyResult]) -> list[TargetResult]:
    """A result that breaks the contract becomes a failure of its sequence."""
    return codec.decode_each(results, decode_result, _broken)


def _broken(header: Header, error: InvalidMessage) -> TargetResult:
    return TargetResult(header, Failure(f"the worker sent an invalid result: {error}"))


def _encode_committed(body: Committed) -> pb.Committed:
    return pb.Committed(
        token_ids=body.token_ids,
        sources=codec.encode_sources(body.sources),
        num_draft_tokens=body.num_draft_tokens,
        draft_length=body.draft_length,
        finish_reason=codec.encode_finish_reason(body.finish_reason),
        step_time=codec.encode_duration(body.step_time),
        batch_size=body.batch_size,
        repeated_answer=body.repeated_answer,
        logprobs=codec_sampling.encode_logprobs(body.logprobs),
        margins=body.margins,
    )


def _decode_committed(message: pb.Committed) -> Committed:
    token_ids = codec.decode_token_ids(message.token_ids, "committed.token_ids")
    sources = codec.decode_sources(message.sources, "committed.sources")
    if len(token_ids) != len(sources):
        problem = f"holds {len(sources)}, must hold one per token ({len(token_ids)})"
        raise InvalidMessage("committed.sources", problem)
    return Committed(
        token_ids,
        sources,
        message.num_draft_tokens,
        message.draft_length,
        codec.decode_finish_reason(message.finish_reason, "committed.finish_reason"),
        codec.decode_duration(message.step_time, "committed.step_time"),
        message.batch_size,
        message.repeated_answer,
        codec_sampling.decode_logprobs(message.logprobs, len(token_ids), "committed.logprobs"),
        tuple(message.margins[:]),
    )


def _decode_result_body(result: pb.VerifyResult) -> ResultBody:
    kind = result.WhichOneof("kind")
    if kind == "committed":
        return _decode_committed(result.committed)
    if kind == "opened":
        return Opened(result.opened.cached_length)
    if kind == "prefilled":
        return Prefilled(result.prefilled.length)
    if kind == "stale":
        return StaleBlock(result.stale.log_length)
    if kind == "need_tokens":
        return NeedTokens(result.need_tokens.have_length)
    if kind == "refusal":
        return codec.decode_refusal(result.refusal, "refusal")
    if kind == "failure":
        return Failure(result.failure.message)
    if kind == "released":
        return Released()
    raise InvalidMessage("kind", "is missing")
