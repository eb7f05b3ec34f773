"""The draft worker's messages to and from the wire.

Items and results travel in batches. One that breaks the contract is answered alone; its neighbours are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.v1 import draft_service_pb2 as pb
from services import codec, codec_sampling
from services.codec import InvalidMessage
from specdec.messages import (
    DraftAdvance,
    DraftBlock,
    DraftItem,
    DraftOpen,
    DraftPlan,
    DraftResult,
    Failure,
    Header,
    NeedTokens,
    Refusal,
    RefusalReason,
    Release,
    Released,
)

ResultBody = DraftBlock | NeedTokens | Refusal | Failure | Released


# scheduler -> draft worker


def encode_item(item: DraftItem) -> pb.DraftItem:
    """Raises ValueError if a number does not fit the wire."""
    message = pb.DraftItem()
    fill_item(item, message)
    return message


def fill_item(item: DraftItem, message: pb.DraftItem) -> None:
    """As `encode_item`, in place."""
    codec.fill_header(item.header, message.header)
    body = item.body
    if isinstance(body, DraftAdvance):
        advance = message.advance
        advance.token_ids.extend(body.token_ids)
        _fill_plan(body.plan, advance.plan)
    elif isinstance(body, DraftOpen):
        message.open.CopyFrom(_encode_open(body))
    else:
        message.release.SetInParent()


def decode_item(item: pb.DraftItem) -> DraftItem:
    """Raises InvalidMessage."""
    header = codec.decode_header(item.header)
    kind = item.WhichOneof("kind")
    if kind == "advance":
        codec.require(item.advance, "plan", "advance")
        token_ids = codec.decode_token_ids(item.advance.token_ids, "advance.token_ids")
        return DraftItem(header, DraftAdvance(token_ids, _decode_plan(item.advance.plan, "advance.plan")))
    if kind == "open":
        return DraftItem(header, _decode_open(item.open, header.base_length))
    if kind == "release":
        return DraftItem(header, Release())
    raise InvalidMessage("kind", "is missing")


def decode_items(items: Iterable[pb.DraftItem]) -> tuple[list[DraftItem], list[DraftResult]]:
    """The items that keep the contract, and a refusal for each one that does not."""
    refusals: list[DraftResult] = []

    def refuse(header: Header, error: InvalidMessage) -> None:
        refusals.append(DraftResult(header, Refusal(RefusalReason.INVALID, str(error))))

    return codec.decode_each(items, decode_item, refuse), refusals


def _encode_plan(plan: DraftPlan) -> pb.DraftPlan:
    message = pb.DraftPlan()
    _fill_plan(plan, message)
    return message


def _fill_plan(plan: DraftPlan, message: pb.DraftPlan) -> None:
    message.SetInParent()
    message.draft_length = plan.draft_length
    message.width = plan.width
    message.window = plan.window
    message.min_confidence = plan.min_confidence
    message.fan_out = plan.fan_out


def _decode_plan(plan: pb.DraftPlan, field: str) -> DraftPlan:
    if plan.width < 1:
        raise InvalidMessage(f"{field}.width", "is 0, must be 1 or more")
    if plan.window < 1:
        raise InvalidMessage(f"{field}.window", "is 0, must be 1 or more")
    if not 0 <= plan.min_confidence <= 1:
        raise InvalidMessage(f"{field}.min_confidence", f"is {plan.min_confidence:g}, must be in [0, 1]")
    return DraftPlan(plan.draft_length, plan.width, plan.window, plan.min_confidence, plan.fan_out)


def _encode_open(body: DraftOpen) -> pb.DraftOpen:
    return pb.DraftOpen(
        token_ids=body.token_ids,
        sampling=codec_sampling.encode_sampling(body.sampling),
        stop=codec.encode_stop(body.stop),
        plan=_encode_plan(body.plan),
        root_digest=body.root_digest,
    )


def _decode_open(message: pb.DraftOpen, base_length: int) -> DraftOpen:
    for field in ("sampling", "stop", "plan"):
        codec.require(message, field, "open")
    token_ids = codec.decode_token_ids(message.token_ids, "open.token_ids")
    if len(token_ids) != base_length:
        raise InvalidMessage("header.base_length", f"is {base_length}, but open.token_ids holds {len(token_ids)}")
    return DraftOpen(
        token_ids,
        codec_sampling.decode_sampling(message.sampling, "open.sampling"),
        codec.decode_stop(message.stop, "open.stop"),
        _decode_plan(message.plan, "open.plan"),
        codec.decode_digest(message.root_digest, "open.root_digest"),
    )


# draft worker -> scheduler


def encode_result(result: DraftResult) -> pb.DraftResult:
    """Raises ValueError if a number does not fit the wire."""
    header = codec.encode_header(result.header)
    body = result.body
    if isinstance(body, DraftBlock):
        block = pb.DraftBlock(
            candidates=codec.encode_candidates(body.candidates, confidences=True),
            draft_time=codec.encode_duration(body.draft_time),
            fan_out=body.fan_out,
        )
        return pb.DraftResult(header=header, block=block)
    if isinstance(body, NeedTokens):
        return pb.DraftResult(header=header, need_tokens=codec.encode_need_tokens(body))
    if isinstance(body, Refusal):
        return pb.DraftResult(header=header, refusal=codec.encode_refusal(body))
    if isinstance(body, Failure):
        return pb.DraftResult(header=header, failure=codec.encode_failure(body))
    return pb.DraftResult(header=header, released=pb.DraftReleased())


def decode_result(result: pb.DraftResult) -> DraftResult:
    """Raises InvalidMessage."""
    return DraftResult(codec.decode_header(result.header), _decode_result_body(result))


def decode_results(results: Sequence[pb.DraftResult]) -> list[DraftResult]:
    """A result that breaks the contract becomes a failure of its sequence: a drafter can waste time, no more."""
    return codec.decode_each(results, decode_result, _broken)


def _broken(header: Header, error: InvalidMessage) -> DraftResult:
    return DraftResult(header, Failure(f"the worker sent an invalid result: {error}"))


def _decode_result_body(result: pb.DraftResult) -> ResultBody:
    kind = result.WhichOneof("kind")
    if kind == "block":
        block = result.block
        return DraftBlock(
            codec.decode_candidates(block.candidates, "block.candidates"),
            codec.decode_duration(block.draft_time, "block.draft_time"),
            block.fan_out,
        )
    if kind == "need_tokens":
        return NeedTokens(result.need_tokens.have_length)
    if kind == "refusal":
        return codec.decode_refusal(result.refusal, "refusal")
    if kind == "failure":
        return Failure(result.failure.message)
    if kind == "released":
        return Released()
    raise InvalidMessage("kind", "is missing")
