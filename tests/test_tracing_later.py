"""Spans are made when answers are told, in small parts and in order, and on a loop that is never quiet all the same."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.entries import Admitted, Ended, Entry, Placed
from scheduler.request import SpeculationSummary
from services.telemetry import tracing_later
from services.telemetry.tracing import TracingConfig
from services.telemetry.tracing_context import new_trace
from services.telemetry.tracing_later import MAX_WAITING, PART, Later
from services.telemetry.tracing_requests import RequestTraces
from services.telemetry.tracing_span import FinishedSpan
from services.telemetry.tracing_start import SchedulerTracing
from specdec.commit import FinishReason
from tools.otlp_receiver import otlp_receiver
from tools.waiting import until


class Spans:
    def __init__(self) -> None:
        self.names: list[str] = []

    def put(self, span: FinishedSpan) -> None:
        self.names.append(span.name)


def _journal(traceparent: str) -> list[Entry]:
    """Of an answer whose target was lost once."""
    return [
        Admitted("00000000000000ab", 1.0, "m", 3, traceparent=traceparent),
        Placed("00000000000000ab", 1.5, 1, 3, "target-0"),
        Placed("00000000000000ab", 2.0, 2, 3, "target-1", cause="lost"),
        Ended("00000000000000ab", 3.0, 4, FinishReason.LENGTH, SpeculationSummary()),
    ]


@pytest.mark.parametrize(("ratio", "slow_seconds"), [(1.0, 60.0), (0.0, 1.0)], ids=["sampled", "slow"])
async def test_reading_the_journal_makes_no_span_and_quiet_makes_them_all(ratio: float, slow_seconds: float) -> None:
    spans = Spans()
    reader = RequestTraces(spans, slow_seconds, lambda span_id: None)
    for entry in _journal(new_trace(ratio).traceparent):
        reader(entry)
    assert spans.names == []
    await until(lambda: len(spans.names) == 3, "they are made")
    assert spans.names == ["queue", "failover", "request"]


async def test_what_is_put_off_at_the_end_of_a_process_is_sent() -> None:
    async with otlp_receiver() as receiver:
        tracing = SchedulerTracing.of(TracingConfig(receiver.endpoint, "scheduler", "s"))
        for entry in _journal(new_trace(1.0).traceparent):
            tracing.reader(entry)
        await tracing.close()
    assert {span.name for span in receiver.spans} == {"queue", "failover", "request"}


async def test_what_waits_is_done_in_parts_between_which_others_run() -> None:
    done: list[int] = []
    most = 0
    later: Later[int] = Later(done.append)
    for number in range(3 * PART):
        later.put(number)
    before = 0
    while len(done) < 3 * PART:
        await asyncio.sleep(0)
        most, before = max(most, len(done) - before), len(done)
    assert most == PART
    assert done == list(range(3 * PART))


async def test_a_loop_that_is_never_quiet_gets_it_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_later, "QUIET_SECONDS", 0.0)
    done: list[int] = []
    later: Later[int] = Later(done.append)
    for number in range(200):
        later.put(number)
        await asyncio.sleep(0)
    assert len(done) > 100
    later.flush()
    assert done == list(range(200))


async def test_what_cannot_be_done_loses_itself_alone() -> None:
    done: list[int] = []

    def do(number: int) -> None:
        if number == 1:
            raise ValueError("planted")
        done.append(number)

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    later: Later[int] = Later(do)
    for number in range(3):
        later.put(number)
    await until(lambda: done == [0], "one failed")
    later.put(3)
    await until(lambda: done == [0, 2, 3], "the others are done")


async def test_memory_is_bounded_and_the_oldest_falls() -> None:
    done: list[int] = []
    later: Later[int] = Later(done.append)
    for number in range(2 * MAX_WAITING):
        later.put(number)
    later.flush()
    assert done == list(range(MAX_WAITING, 2 * MAX_WAITING))
