"""Which requests are recorded: the sampled ones as they go on, those that fail or are slow whatever was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from draft_worker.worker import DraftWorker
from scheduler.entries import Admitted, Ended
from scheduler.errors import DeadlineExceeded
from scheduler.request import GenerationRequest, SpeculationSummary, Tokens
from services.telemetry.tracing_calls import Calls
from services.telemetry.tracing_context import Call, TraceContext, new_trace, parse
from services.telemetry.tracing_requests import FIRST_ENTRIES, LAST_ENTRIES, RequestTraces
from services.telemetry.tracing_span import FinishedSpan
from services.telemetry.tracing_worker import TracedWorker
from specdec.commit import FinishReason
from specdec.messages import Role
from specdec.params import SamplingParams
from target_worker.worker import TargetWorker
from tools.continuations import LawContinuation
from tools.deployment import Deployment, DraftSpec, quick_config
from tools.scripted import ScriptedDrafter, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=24, traced=True)


@dataclass
class Recorded:
    """A `SpanSink` that remembers, and the calls above what it takes."""

    ratio: float
    slow_seconds: float = 60.0
    spans: list[FinishedSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = Calls(self, self.ratio, self.slow_seconds)
        self.reader = RequestTraces(self, self.slow_seconds, self.calls.of)

    def put(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    @property
    def names(self) -> set[str]:
        return {span.name for span in self.spans}

    @contextmanager
    def call(self) -> Iterator[tuple[Call, GenerationRequest]]:
        with self.calls.answering("", "") as call:
            yield call, replace(REQUEST, traceparent=call.context.traceparent)
            self.calls.end(call, "call", {})
        self.reader.flush()


def _deployment(recorded: Recorded, model: TableModel | None = None) -> Deployment:
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    return Deployment([model or TableModel(LAW)], [drafter], quick_config(4), readers=[recorded.reader])


async def test_a_sampled_request_is_recorded_and_an_unsampled_one_leaves_nothing() -> None:
    for ratio, expected in ((1.0, True), (0.0, False)):
        recorded = Recorded(ratio)
        async with _deployment(recorded) as deployment:
            with recorded.call() as (call, request):
                await deployment.generate(request)
        assert bool(recorded.spans) is expected
        assert call.answered


async def test_a_request_that_fails_is_recorded_unsampled_with_its_call() -> None:
    recorded, model = Recorded(0.0), TableModel(LAW)
    model.hold_at(20)
    async with _deployment(recorded, model) as deployment:
        with recorded.call() as (_, request), pytest.raises(DeadlineExceeded):
            await deployment.generate(replace(request, timeout=0.5))
        model.gate.set()
    assert {"call", "request", "queue", "prefill", "spec.draft", "spec.verify", "spec.commit"} <= recorded.names
    failed = {span.name: span.error for span in recorded.spans if span.error}
    assert failed["call"] == "DeadlineExceeded"
    assert failed["request"].startswith("DeadlineExceeded: ")


async def test_a_slow_request_is_recorded_unsampled_and_a_cancelled_one_is_not() -> None:
    slow, cancelled = Recorded(0.0, slow_seconds=0.0), Recorded(0.0)
    async with _deployment(slow) as deployment:
        with slow.call() as (_, request):
            await deployment.generate(request)
    assert {"call", "request", "spec.verify"} <= slow.names
    async with _deployment(cancelled, TableModel(LAW, delay=0.005)) as deployment:
        with cancelled.call() as (_, request):
            async with aclosing(deployment.scheduler.generate(replace(request, max_tokens=400))) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        break
    assert not cancelled.spans


async def test_a_long_unsampled_request_keeps_its_first_and_last_entries_only() -> None:
    recorded = Recorded(0.0, slow_seconds=0.0)
    async with Deployment([TableModel(LAW)], readers=[recorded.reader]) as deployment:
        with recorded.call() as (_, request):
            await deployment.generate(replace(request, max_tokens=400))
    verified = [span for span in recorded.spans if span.name == "spec.verify"]
    (request_span,) = [span for span in recorded.spans if span.name == "request"]
    omitted = request_span.attributes["outrider.omitted_entries"]
    assert isinstance(omitted, int)
    assert len(verified) + omitted == 400
    assert len(verified) < FIRST_ENTRIES + LAST_ENTRIES
    assert verified[-1].attributes["spec_decode.position"] == 399


@pytest.mark.parametrize("ratio", [1.0, 0.0])
async def test_workers_record_what_is_sampled_and_nothing_else(ratio: float) -> None:
    recorded, by_workers = Recorded(ratio), Recorded(1.0)
    async with Deployment([], readers=[recorded.reader]) as deployment:
        target = deployment.add_target(TableModel(LAW))
        draft = deployment.add_draft(DraftSpec(ScriptedDrafter(oracle, LawContinuation(LAW))))
        target.worker = TracedWorker(cast(TargetWorker, target.worker), by_workers)
        draft.worker = TracedWorker(cast(DraftWorker, draft.worker), by_workers)
        deployment.scheduler.add_worker(Role.TARGET, target.address)
        deployment.scheduler.add_worker(Role.DRAFT, draft.address)
        await until(deployment.settled, "both are ready")

        async def let_it_draft() -> None:
            """A block that were there before would be verified in the forward that prefills."""
            await until(lambda: bool(target.results), "the prompt is prefilled")
            draft.thaw()

        draft.freeze()
        with recorded.call() as (_, request):
            answer, _ = await asyncio.gather(deployment.generate(request), let_it_draft())
    assert by_workers.names == ({"target.prefill", "target.step", "draft.block"} if ratio else set())
    if ratio:
        steps = [span for span in by_workers.spans if span.name == "target.step"]
        assert sum(cast(int, span.attributes["spec_decode.tokens"]) for span in steps) == len(answer.token_ids)
        (above,) = {span.parent for span in by_workers.spans}
        assert above is not None
        (mine,) = [span for span in recorded.spans if span.name == "request"]
        assert above == mine.context


async def test_a_call_is_answered_when_all_its_choices_are() -> None:
    recorded = Recorded(1.0)
    names = ["00000000000000ab", "00000000000000cd"]
    with recorded.call() as (call, request):
        for name in names:
            recorded.reader(Admitted(name, 1.0, "m", 3, traceparent=request.traceparent))
        answered = [call.answered]
        for name in names:
            recorded.reader(Ended(name, 2.0, 4, FinishReason.LENGTH, SpeculationSummary()))
            answered.append(call.answered)
    assert answered == [False, False, True]


def test_ratio_decides_by_trace_id_and_a_caller_decides_for_itself() -> None:
    sampled = sum(new_trace(0.25).sampled for _ in range(4000))
    assert 800 < sampled < 1200
    calls = Recorded(1.0).calls
    for flag in ("00", "01"):
        given = f"00-{1:032x}-{2:016x}-{flag}"
        with calls.answering(given, "a=b") as call:
            assert call.parent == TraceContext(1, 2, flag == "01", "a=b")
            assert call.context == replace(call.parent, span_id=call.context.span_id)
            assert call.context.span_id != 2


@pytest.mark.parametrize(
    "text", ["", "nonsense", f"ff-{1:032x}-{2:016x}-01", f"00-{0:032x}-{2:016x}-01", f"00-{1:032x}-{0:016x}-01"]
)
def test_what_is_no_context_begins_a_trace(text: str) -> None:
    assert parse(text) is None


async def test_calls_that_run_side_by_side_keep_apart() -> None:
    recorded = Recorded(1.0)
    async with _deployment(recorded) as deployment:

        async def ask() -> Call:
            with recorded.call() as (call, request):
                await deployment.generate(request)
            return call

        calls = await asyncio.gather(*(ask() for _ in range(4)))
    for call in calls:
        mine = [span for span in recorded.spans if span.context.trace_id == call.context.trace_id]
        assert sum(span.name == "request" for span in mine) == 1
        assert all(span.parent is None or span.parent.trace_id == call.context.trace_id for span in mine)
