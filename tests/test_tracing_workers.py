"""A worker's spans tell what each step took and how it failed, once, and nothing is kept of sequences that left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from services.telemetry.tracing_span import FinishedSpan
from services.telemetry.tracing_worker import TracedWorker
from specdec.commit import TokenSource
from specdec.messages import (
    Committed,
    Epoch,
    Failure,
    Grant,
    Header,
    Identity,
    Load,
    Prefilled,
    Release,
    Role,
    TargetItem,
    TargetOpen,
    TargetResult,
)
from specdec.params import SamplingParams, StopConditions

SPAN_ID = "00000000000000ab"
HEADER = Header(SPAN_ID, Epoch(3, "s"), 3, b"", f"00-{'cd' * 16}-{SPAN_ID}-01", "a=b")
OPEN = TargetOpen((1, 2, 3), SamplingParams(), StopConditions(3, 20), Grant(20), bytes(16))
STEP = Committed((4, 5, 6), (TokenSource.ACCEPTED, TokenSource.ACCEPTED, TokenSource.BONUS), 2, 2, step_time=0.5)


class Worker:
    """A `StreamWorker` whose results are those of the test."""

    identity = Identity("target-0", Role.TARGET, "m")
    crash = None

    def __init__(self) -> None:
        self.deliver: Callable[[list[TargetResult]], None] = lambda results: None

    def attach(self, deliver: Callable[[list[TargetResult]], None]) -> int:
        self.deliver = deliver
        return 1

    def submit(self, session: int, items: Sequence[TargetItem]) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def detach(self, session: int) -> None: ...
    def drain(self) -> None: ...
    def load(self) -> Load:
        return Load()


class Traced:
    """A sampled sequence is open. spans: what was recorded; delivered: what went on."""

    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []
        self.delivered: list[TargetResult] = []
        self.inner = Worker()
        self.worker: TracedWorker[TargetItem, TargetResult] = TracedWorker(self.inner, self)
        self.session = self.worker.attach(self.delivered.extend)
        self.worker.submit(self.session, [TargetItem(HEADER, OPEN)])

    def put(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def tell(self, *bodies: Committed | Prefilled | Failure) -> None:
        """Results carry no context: who asked knows it."""
        header = replace(HEADER, traceparent="", tracestate="")
        self.inner.deliver([TargetResult(header, body) for body in bodies])


def test_a_step_has_its_own_time_and_lies_below_the_sequence() -> None:
    traced = Traced()
    before = time.time()
    traced.tell(STEP)
    (span,) = traced.spans
    assert span.name == "target.step"
    assert span.ended - span.began == pytest.approx(0.5)
    assert before - 0.1 <= span.ended <= time.time() + 0.1
    assert span.parent is not None
    assert (span.parent.span_id, span.parent.trace_id) == (0xAB, int("cd" * 16, 16))
    assert span.context.state == "a=b"
    expected = {"spec_decode.accepted": 2, "spec_decode.tokens": 3, "spec_decode.epoch": 3, "outrider.rows": 3}
    assert expected.items() <= span.attributes.items()
    assert span.attributes["outrider.sequence_id"] == SPAN_ID


def test_an_answer_that_is_told_again_was_computed_once() -> None:
    traced = Traced()
    traced.tell(STEP)
    traced.tell(replace(STEP, repeated_answer=True))
    assert len(traced.spans) == 1
    assert len(traced.delivered) == 2


def test_chunks_of_a_prefill_follow_one_another() -> None:
    traced = Traced()
    traced.tell(Prefilled(2))
    traced.tell(Prefilled(3))
    first, second = traced.spans
    assert (first.name, second.name) == ("target.prefill", "target.prefill")
    assert second.began == pytest.approx(first.ended, abs=0.01)
    assert [span.attributes["outrider.prefilled_length"] for span in traced.spans] == [2, 3]


def test_a_failure_is_an_error_with_its_reason() -> None:
    traced = Traced()
    traced.tell(Failure("a row of NaN"))
    (span,) = traced.spans
    assert (span.name, span.error) == ("target.step", "a row of NaN")


@pytest.mark.parametrize("leave", ["release", "the stream"])
def test_nothing_is_kept_of_a_sequence_that_left(leave: str) -> None:
    traced = Traced()
    if leave == "release":
        traced.worker.submit(traced.session, [TargetItem(HEADER, Release())])
    else:
        traced.worker.detach(traced.session)
    traced.tell(STEP)
    assert traced.spans == []
    assert not traced.worker._sampled


def test_a_stream_that_ends_takes_no_sequence_of_another_one() -> None:
    traced = Traced()
    traced.worker.detach(traced.session + 1)
    traced.tell(STEP)
    assert len(traced.spans) == 1
