"""The wire carries every value unchanged, and refuses what breaks the contract by the name of the field."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.v1 import draft_service_pb2, target_service_pb2, types_pb2
from scheduler.scheduler import WorkerView
from services import codec, codec_control, codec_draft, codec_target
from services.codec import InvalidMessage
from services.codec_control import SequenceView
from specdec.candidates import MAX_CANDIDATES, ROOT, CandidateTree
from specdec.commit import FinishReason, TokenSource
from specdec.messages import (
    Committed,
    DraftAdvance,
    DraftBlock,
    DraftItem,
    DraftOpen,
    DraftPlan,
    DraftResult,
    Epoch,
    Failure,
    Grant,
    Header,
    Identity,
    Load,
    NeedTokens,
    Opened,
    Prefilled,
    Refusal,
    RefusalReason,
    Release,
    Released,
    Role,
    StaleBlock,
    TargetItem,
    TargetOpen,
    TargetResult,
    VerifyBlock,
)
from specdec.params import LogprobsOf, Report, SamplingParams, StopConditions

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=12)
token_id = st.integers(0, 2**31 - 1)
token_ids = st.lists(token_id, max_size=20).map(tuple)
digest = st.binary(min_size=16, max_size=16)
seconds = st.integers(0, 10**12).map(lambda ns: ns / 1e9)
epochs = st.builds(Epoch, u64, text)
headers = st.builds(
    Header,
    sequence_id=st.text(min_size=1, max_size=12),
    epoch=epochs,
    base_length=u32,
    prefix_digest=digest,
    traceparent=text,
    tracestate=text,
    time_remaining=st.none() | seconds | seconds.map(lambda s: -s),
)


@st.composite
def _trees(draw: st.DrawFn) -> CandidateTree:
    ids = draw(token_ids)
    return CandidateTree(ids, tuple(draw(st.integers(ROOT, i - 1)) for i in range(len(ids))))


trees = _trees()
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_k=u32,
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    min_p=st.floats(0, 1, width=32),
    seed=u64,
)
stops = st.builds(
    lambda prompt, more, least, ids: StopConditions(prompt, prompt + more, least, frozenset(ids)),
    st.integers(0, 2**31),
    st.integers(0, 2**30),
    u32,
    st.lists(token_id, max_size=5),
)
grants = st.builds(Grant, u32, seconds)
reports = st.builds(Report, st.none() | u32, st.sampled_from(LogprobsOf), st.booleans(), st.floats(0, 1e6))
plans = st.builds(DraftPlan, u32, st.integers(1, 99), st.integers(1, 99), fan_out=u32)
refusals = st.builds(Refusal, st.sampled_from(RefusalReason), text, st.none() | epochs)
failures = st.builds(Failure, text)
need_tokens = st.builds(NeedTokens, u32)


@st.composite
def _opens(draw: st.DrawFn) -> TargetItem | DraftItem:
    """An open's base is the length of its tokens."""
    ids = draw(st.lists(token_id, min_size=1, max_size=20).map(tuple))
    base = draw(headers)
    header = Header(base.sequence_id, base.epoch, len(ids), base.prefix_digest, base.traceparent)
    law, stop, root = draw(sampling), draw(stops), draw(digest)
    if draw(st.booleans()):
        return TargetItem(header, TargetOpen(ids, law, stop, draw(grants), root, draw(reports)))
    return DraftItem(header, DraftOpen(ids, law, stop, draw(plans), root))


committed = st.lists(st.tuples(token_id, st.sampled_from(TokenSource)), max_size=20).flatmap(
    lambda tokens: st.builds(
        Committed,
        token_ids=st.just(tuple(token for token, _ in tokens)),
        sources=st.just(tuple(source for _, source in tokens)),
        num_draft_tokens=u32,
        draft_length=u32,
        finish_reason=st.none() | st.sampled_from(FinishReason),
        step_time=seconds,
        batch_size=u32,
        repeated_answer=st.booleans(),
    )
)
target_bodies = st.builds(VerifyBlock, trees, grants) | st.just(Release())
target_results = st.one_of(
    committed,
    st.builds(Opened, u32),
    st.builds(Prefilled, u32),
    st.builds(StaleBlock, u32),
    need_tokens,
    refusals,
    failures,
    st.just(Released()),
)
draft_bodies = st.builds(DraftAdvance, token_ids, plans) | st.just(Release())
draft_results = st.one_of(
    st.builds(DraftBlock, trees, seconds, st.booleans()), need_tokens, refusals, failures, st.just(Released())
)


@given(st.builds(TargetItem, headers, target_bodies))
def test_target_items_survive_the_wire(item: TargetItem) -> None:
    wire = codec_target.encode_item(item).SerializeToString()
    assert codec_target.decode_item(target_service_pb2.VerifyItem.FromString(wire)) == item


@given(_opens())
def test_opens_survive_the_wire(item: TargetItem | DraftItem) -> None:
    if isinstance(item, TargetItem):
        assert codec_target.decode_item(codec_target.encode_item(item)) == item
    else:
        assert codec_draft.decode_item(codec_draft.encode_item(item)) == item


@given(st.builds(TargetResult, headers, target_results))
def test_target_results_survive_the_wire(result: TargetResult) -> None:
    wire = codec_target.encode_result(result).SerializeToString()
    assert codec_target.decode_result(target_service_pb2.VerifyResult.FromString(wire)) == result


@given(st.builds(DraftItem, headers, draft_bodies))
def test_draft_items_survive_the_wire(item: DraftItem) -> None:
    wire = codec_draft.encode_item(item).SerializeToString()
    assert codec_draft.decode_item(draft_service_pb2.DraftItem.FromString(wire)) == item


@given(st.builds(DraftResult, headers, draft_results))
def test_draft_results_survive_the_wire(result: DraftResult) -> None:
    wire = codec_draft.encode_result(result).SerializeToString()
    assert codec_draft.decode_result(draft_service_pb2.DraftResult.FromString(wire)) == result


identities = st.builds(
    Identity,
    worker_id=st.text(min_size=1, max_size=9),
    role=st.sampled_from(Role),
    model_name=text,
    vocabulary_size=u32,
    vocabulary_sha256=text,
    vocabulary_run_digests=st.binary(max_size=64),
    context_length=u32,
    version=text,
    protocol_version=u32,
    drafter=text,
    device=text,
    dtype=text,
    numeric_noise=st.floats(0, 1e6),
    turns=st.text(max_size=20),
)
loads = st.builds(Load, u32, u64, u64, u64, u64, u32, u64, u64, u64)


@given(identities, loads, st.sampled_from(["connecting", "ready", "refused", "suspended", "lost", "draining"]))
def test_what_status_shows_survives_the_wire(identity: Identity, load: Load, state: str) -> None:
    whole = WorkerView("127.0.0.1:1", identity.role, state, "why", identity, load)
    unreached = WorkerView("127.0.0.1:1", identity.role, state, "", None, None)
    for view in (whole, unreached):
        assert codec_control.decode_worker(codec_control.encode_worker(view, 1.5)) == view
    assert codec_control.encode_worker(whole, 1.5).lease_remaining.ToMilliseconds() == 1500
    assert not codec_control.encode_worker(whole).HasField("lease_remaining")


@given(st.builds(SequenceView, text, epochs, u32, u32, text, text, text))
def test_sequences_survive_the_wire(view: SequenceView) -> None:
    assert codec_control.decode_sequence(codec_control.encode_sequence(view)) == view


HEADER = Header("s", Epoch(1, "scheduler-1"), 3, bytes(16))
STOP = StopConditions(3, 10)
OPEN = codec_target.encode_item(TargetItem(HEADER, TargetOpen((1, 2, 3), SamplingParams(), STOP, Grant(10), bytes(16))))
VERIFY = codec_target.encode_item(TargetItem(HEADER, VerifyBlock(CandidateTree.chain([1, 2]), Grant(9))))
Spoil = Callable[[target_service_pb2.VerifyItem], object]


def _set(message: object, field: str, value: object) -> None:
    setattr(message, field, value)


@pytest.mark.parametrize(
    ("item", "spoil", "field"),
    [
        (VERIFY, lambda m: m.ClearField("verify"), "kind"),
        (VERIFY, lambda m: m.ClearField("header"), "header.sequence_id"),
        (VERIFY, lambda m: _set(m.header, "sequence_id", "x" * 300), "header.sequence_id"),
        (VERIFY, lambda m: m.header.ClearField("epoch"), "header.epoch"),
        (VERIFY, lambda m: _set(m.header, "prefix_digest", b"short"), "header.prefix_digest"),
        (VERIFY, lambda m: _set(m.header.time_remaining, "nanos", 2_000_000_000), "header.time_remaining"),
        (VERIFY, lambda m: m.verify.ClearField("grant"), "verify.grant"),
        (VERIFY, lambda m: _set(m.verify.grant.patience, "seconds", -1), "verify.grant.patience"),
        (VERIFY, lambda m: m.verify.candidates.token_ids.append(5), "verify.candidates"),
        (VERIFY, lambda m: m.verify.candidates.parents.__setitem__(0, 1), "verify.candidates"),
        (VERIFY, lambda m: m.verify.candidates.token_ids.__setitem__(1, -1), "verify.candidates"),
        (OPEN, lambda m: _set(m.open.sampling, "temperature", math.nan), "open.sampling"),
        (OPEN, lambda m: _set(m.open.sampling, "temperature", -1), "open.sampling"),
        (OPEN, lambda m: _set(m.open.sampling, "top_p", 0), "open.sampling"),
        (OPEN, lambda m: m.open.ClearField("sampling"), "open.sampling"),
        (OPEN, lambda m: _set(m.open.report, "noise", math.nan), "open.report.noise"),
        (OPEN, lambda m: m.open.ClearField("stop"), "open.stop"),
        (OPEN, lambda m: m.open.ClearField("grant"), "open.grant"),
        (OPEN, lambda m: _set(m.open.stop, "max_length", 2), "open.stop.max_length"),
        (OPEN, lambda m: m.open.stop.stop_token_ids.append(2**31), "open.stop.stop_token_ids"),
        (OPEN, lambda m: m.open.token_ids.append(2**31), "open.token_ids"),
        (OPEN, lambda m: m.open.ClearField("token_ids"), "open.token_ids"),
        (OPEN, lambda m: m.open.token_ids.append(4), "header.base_length"),
        (OPEN, lambda m: m.open.ClearField("root_digest"), "open.root_digest"),
    ],
)
def test_a_broken_item_is_refused_by_the_name_of_its_field(
    item: target_service_pb2.VerifyItem, spoil: Spoil, field: str
) -> None:
    broken = target_service_pb2.VerifyItem.FromString(item.SerializeToString())
    spoil(broken)
    with pytest.raises(InvalidMessage) as caught:
        codec_target.decode_item(broken)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)


def test_more_candidates_than_a_block_may_hold_are_refused() -> None:
    many = TargetItem(HEADER, VerifyBlock(CandidateTree.chain(range(MAX_CANDIDATES + 1)), Grant(9)))
    with pytest.raises(InvalidMessage, match="at most 256"):
        codec_target.decode_item(codec_target.encode_item(many))


def test_a_broken_item_is_answered_alone() -> None:
    broken = target_service_pb2.VerifyItem.FromString(VERIFY.SerializeToString())
    broken.header.sequence_id = "broken"
    broken.header.prefix_digest = b""
    nameless = target_service_pb2.VerifyItem()
    good, refused = codec_target.decode_items([VERIFY, broken, nameless, OPEN])
    assert [item.header.sequence_id for item in good] == ["s", "s"]
    (refusal,) = refused
    assert refusal.header.sequence_id == "broken"
    assert refusal.header.epoch == HEADER.epoch
    assert isinstance(refusal.body, Refusal)
    assert refusal.body.reason is RefusalReason.INVALID
    # The answer itself keeps the contract.
    assert codec_target.decode_result(codec_target.encode_result(refusal)) == refusal


def test_a_broken_draft_item_is_answered_alone() -> None:
    good_item = codec_draft.encode_item(DraftItem(HEADER, DraftAdvance((1,), DraftPlan(3))))
    broken = draft_service_pb2.DraftItem.FromString(good_item.SerializeToString())
    broken.advance.plan.width = 0
    good, refused = codec_draft.decode_items([broken, good_item])
    assert len(good) == 1
    assert "advance.plan.width" in refused[0].body.message  # type: ignore[union-attr]


def test_a_garbage_block_becomes_a_failure_of_its_sequence_alone() -> None:
    """A drafter may send anything; it must not cost its neighbours their stream."""
    block = codec_draft.encode_result(DraftResult(HEADER, DraftBlock(CandidateTree.chain([1]))))
    garbage = draft_service_pb2.DraftResult.FromString(block.SerializeToString())
    garbage.block.candidates.parents[0] = 7
    results = codec_draft.decode_results([garbage, draft_service_pb2.DraftResult(), block])
    assert [type(result.body) for result in results] == [Failure, DraftBlock]
    wrong = codec_target.encode_result(TargetResult(HEADER, Committed((1,), (TokenSource.PLAIN,))))
    wrong.committed.sources[0] = types_pb2.TOKEN_SOURCE_UNSPECIFIED
    (failure,) = codec_target.decode_results([wrong])
    assert isinstance(failure.body, Failure)
    assert "committed.sources[0]" in failure.body.message


def test_split_keeps_order_and_size() -> None:
    items = [VERIFY] * 10
    groups = list(codec.split(items, 3 * VERIFY.ByteSize()))
    assert [len(group) for group in groups] == [3, 3, 3, 1]
    assert [len(group) for group in codec.split(items, 1)] == [1] * 10
    assert list(codec.split([], 1)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e12])
def test_a_duration_that_cannot_be_sent_says_so(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        codec.encode_duration(value)
