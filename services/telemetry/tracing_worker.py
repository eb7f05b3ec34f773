"""What a worker computes for sequences that are sampled, as spans below their `request`.

It looks at what passes between the streams and the worker's thread, and changes nothing. A worker records what the
scheduler sampled as the request began; of what the scheduler records for its end alone, the worker learns too late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from services.telemetry.tracing_context import TraceContext, parse
from services.telemetry.tracing_span import Attribute, FinishedSpan, SpanSink, wall_clock
from services.worker_stream import ItemIn, ResultOut, StreamWorker
from specdec.commit import TokenSource
from specdec.messages import (
    Committed,
    DraftBlock,
    DraftItem,
    DraftOpen,
    DraftResult,
    Failure,
    Header,
    Identity,
    Load,
    Prefilled,
    Release,
    TargetItem,
    TargetOpen,
    TargetResult,
)


@dataclass(slots=True)
class _Sampled:
    """since: when it was opened or last prefilled, monotonic seconds."""

    session: int
    request: TraceContext
    since: float


class TracedWorker(Generic[ItemIn, ResultOut]):
    """Implements `StreamWorker` over another one."""

    def __init__(self, worker: StreamWorker[ItemIn, ResultOut], sink: SpanSink) -> None:
        self._worker = worker
        self._sink = sink
        self._sampled: dict[str, _Sampled] = {}

    @property
    def identity(self) -> Identity:
        return self._worker.identity

    @property
    def crash(self) -> Exception | None:
        return self._worker.crash

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        self._worker.stop()

    def drain(self) -> None:
        self._worker.drain()

    def load(self) -> Load:
        return self._worker.load()

    def attach(self, deliver: Callable[[list[ResultOut]], None]) -> int:
        def traced(results: list[ResultOut]) -> None:
            now, mine = time.monotonic(), self._sampled_of(results)
            deliver(results)  # who reads the last of them releases the sequence, so it was looked up before
            if mine:
                self._computed(mine, _Batch.of(results), now)

        return self._worker.attach(traced)

    def submit(self, session: int, items: Sequence[ItemIn]) -> None:
        for item in items:
            if isinstance(item, (TargetItem, DraftItem)):
                self._see(session, item)
        self._worker.submit(session, items)

    def detach(self, session: int) -> None:
        self._worker.detach(session)
        gone = [sequence_id for sequence_id, sampled in list(self._sampled.items()) if sampled.session == session]
        for sequence_id in gone:
            self._sampled.pop(sequence_id, None)

    def _see(self, session: int, item: TargetItem | DraftItem) -> None:
        header = item.header
        if isinstance(item.body, (TargetOpen, DraftOpen)):
            context = parse(header.traceparent, header.tracestate) if header.traceparent else None
            if context is not None and context.sampled:
                self._sampled[header.sequence_id] = _Sampled(session, context, time.monotonic())
        elif isinstance(item.body, Release):
            self._sampled.pop(header.sequence_id, None)

    def _sampled_of(self, results: Sequence[object]) -> list[tuple[TargetResult | DraftResult, _Sampled]]:
        if not self._sampled:
            return []
        return [
            (result, sampled)
            for result in results
            if isinstance(result, (TargetResult, DraftResult))
            and (sampled := self._sampled.get(result.header.sequence_id)) is not None
        ]

    def _computed(
        self, results: Sequence[tuple[TargetResult | DraftResult, _Sampled]], batch: _Batch, now: float
    ) -> None:
        """On the worker's thread, right after the step that made them at `now`."""
        clock = wall_clock()
        for result, sampled in results:
            for span in _spans(result, sampled, batch, now, clock):
                self._sink.put(span)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one step did for a stream. rows: those that decided tokens. blocks: of candidates."""

    rows: int
    blocks: int

    @classmethod
    def of(cls, results: Sequence[object]) -> _Batch:
        bodies = [result.body for result in results if isinstance(result, (TargetResult, DraftResult))]
        rows = sum(1 + body.num_draft_tokens for body in bodies if isinstance(body, Committed))
        return cls(rows, sum(isinstance(body, DraftBlock) for body in bodies))


def _spans(
    result: TargetResult | DraftResult, sampled: _Sampled, batch: _Batch, now: float, clock: float
) -> Iterator[FinishedSpan]:
    """Of one result. now: monotonic seconds; clock: as of `wall_clock`."""
    header, body = result.header, result.body
    name, began, error = "", now, ""
    attributes: dict[str, Attribute] = {}
    if isinstance(body, Committed) and not body.repeated_answer:
        name, began = "target.step", now - body.step_time
        attributes = {
            "spec_decode.draft_length": body.draft_length,
            "spec_decode.accepted": body.sources.count(TokenSource.ACCEPTED),
            "spec_decode.mode": "speculative" if body.num_draft_tokens else "plain",
            "spec_decode.tokens": len(body.token_ids),
            "outrider.batch_size": body.batch_size,
            "outrider.rows": batch.rows,
        }
    elif isinstance(body, Prefilled):
        name, began, sampled.since = "target.prefill", sampled.since, now
        attributes = {"outrider.prefilled_length": body.length}
    elif isinstance(body, DraftBlock):
        name, began = "draft.block", now - body.draft_time
        attributes = {
            "spec_decode.draft_length": body.candidates.draft_length,
            "spec_decode.candidates": len(body.candidates),
            "outrider.batch_size": batch.blocks,
        }
    elif isinstance(body, Failure):
        name, error = "target.step" if isinstance(result, TargetResult) else "draft.block", body.message
    if name:
        yield _span(name, header, sampled.request, (began + clock, now + clock), attributes, error)


def _span(
    name: str,
    header: Header,
    request: TraceContext,
    times: tuple[float, float],
    attributes: dict[str, Attribute],
    error: str,
) -> FinishedSpan:
    attributes |= {"outrider.sequence_id": header.sequence_id, "spec_decode.epoch": header.epoch.number}
    return FinishedSpan(name, request.child(), request, times[0], times[1], attributes, error=error)
