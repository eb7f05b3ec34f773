"""Whatever the collector does, nothing waits for it, memory stays bounded, and a process ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.telemetry.tracing import Tracing, TracingConfig
from services.telemetry.tracing_context import TraceContext
from services.telemetry.tracing_export import ExportLimits, PatientExporter
from services.telemetry.tracing_span import FinishedSpan
from tools.otlp_receiver import otlp_receiver
from tools.ports import free_port
from tools.waiting import PATIENCE, until

LIMITS = ExportLimits(queued=64, batch=8, timeout=0.3, interval=0.01, rest=0.05, last=0.3)


def _span(number: int) -> FinishedSpan:
    return FinishedSpan("s", TraceContext(7, number + 1, False), TraceContext(7, 1, True), 1.0, 2.5, {"number": number})


def _tracing(endpoint: str) -> Tracing:
    return Tracing(TracingConfig(endpoint, "target", "target-0", limits=LIMITS))


@contextmanager
def _never_answers() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def _waiting(tracing: Tracing) -> int:
    return len(tracing._queue.processor._batch_processor._queue)  # what is bounded has no name outside the SDK


async def test_spans_arrive_as_they_are_with_who_made_them() -> None:
    async with otlp_receiver() as receiver:
        tracing = _tracing(receiver.endpoint)
        tracing.put(_span(5))
        await until(lambda: bool(receiver.spans), "it arrives")
        await asyncio.to_thread(tracing.close)
    (span,) = receiver.spans
    assert (span.span_id, span.parent_id) == (f"{6:016x}", f"{1:016x}")
    assert span.ended - span.began == 1_500_000_000
    assert span.attributes == {"number": 5}
    assert span.resource["service.name"] == "outrider-target"
    assert span.resource["service.instance.id"] == "target-0"
    assert span.resource["service.version"]


async def test_what_waits_at_the_end_is_sent() -> None:
    async with otlp_receiver() as receiver:
        tracing = _tracing(receiver.endpoint)
        for number in range(20):
            tracing.put(_span(number))
        await asyncio.to_thread(tracing.close)
    assert sorted(span.attributes["number"] for span in receiver.spans) == list(range(20))


@pytest.mark.parametrize("kind", ["closed", "never answers"])
def test_a_dead_collector_holds_nobody_up_and_memory_is_bounded(kind: str) -> None:
    with _never_answers() as silent:
        tracing = _tracing(f"http://127.0.0.1:{free_port()}" if kind == "closed" else silent)
        for number in range(20_000):
            tracing.put(_span(number))
            assert _waiting(tracing) <= LIMITS.queued
        closing = threading.Thread(target=tracing.close)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()


async def test_a_collector_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    tracing = _tracing(address)
    for number in range(3):
        tracing.put(_span(number))
    exporter = tracing._queue.exporter
    await until(lambda: exporter.dropped == 3, "they are dropped")
    async with otlp_receiver(int(address.rpartition(":")[2])) as receiver:
        async with asyncio.timeout(PATIENCE):
            number = 100
            while not receiver.spans:
                tracing.put(_span(number))
                number += 1
                await asyncio.sleep(0.05)
        await asyncio.to_thread(tracing.close)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.name for record in warnings] == ["services.telemetry.tracing_export"]


class Broken(SpanExporter):
    def __init__(self) -> None:
        self.calls = 0

    def export(self, spans: object) -> SpanExportResult:
        self.calls += 1
        raise OSError("no space left on device")


@pytest.mark.parametrize(("rest", "calls"), [(60.0, 1), (0.0, 3)])
def test_an_exporter_that_raises_is_left_alone_for_a_while_and_told_of_once(
    rest: float, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    exporter = PatientExporter(broken, rest)
    span = ReadableSpan("s")
    assert [exporter.export([span]) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
    assert broken.calls == calls
    assert exporter.dropped == 3
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
