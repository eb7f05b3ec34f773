"""Finished spans on their way to an OpenTelemetry collector.

Whatever the collector does, `put` costs an append: spans wait in a bounded queue, from which the oldest fall, and one
thread sends them. While the collector fails, batches are dropped unsent for a while instead of being encoded in vain.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from services.telemetry.otlp import channel_options, quieten

log = logging.getLogger(__name__)

_PROCESSOR = "opentelemetry.sdk._shared_internal"
"""Warns of each span that falls from the queue."""


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Durations in seconds. queued: spans that wait at most. batch: spans per message. timeout: what one message may
    take. interval: how long spans wait for others. rest: how long a collector that failed is left alone.
    last: what the end of the process waits for the last spans."""

    queued: int = 8192
    batch: int = 128
    timeout: float = 2.0
    interval: float = 1.0
    rest: float = 5.0
    last: float = 2.0


class SpanQueue:
    """`put` from any thread; `close` once."""

    def __init__(self, endpoint: str, limits: ExportLimits) -> None:
        """endpoint: a URL; http:// is without TLS."""
        quieten()
        logging.getLogger(_PROCESSOR).setLevel(logging.ERROR)
        self._limits = limits
        otlp = OTLPSpanExporter(endpoint, timeout=limits.timeout, channel_options=channel_options(endpoint))
        self.exporter = PatientExporter(otlp, limits.rest)
        self.processor = BatchSpanProcessor(
            self.exporter, limits.queued, limits.interval * 1000, min(limits.batch, limits.queued)
        )

    def put(self, span: ReadableSpan) -> None:
        self.processor.on_end(span)

    def close(self) -> None:
        """Sends what waits, within `last` seconds; then it is dropped."""
        self.exporter.end_by(time.monotonic() + self._limits.last)
        closing = threading.Thread(target=self.processor.shutdown, name="spans-close", daemon=True)
        closing.start()
        closing.join(self._limits.last + self._limits.timeout)


class PatientExporter(SpanExporter):
    """Leaves a collector that fails alone for a while, and says so once."""

    def __init__(self, exporter: SpanExporter, rest: float) -> None:
        self._exporter = exporter
        self._rest = rest
        self._try_at = 0.0
        self._end_by = float("inf")
        self._failing = False
        self.dropped = 0
        """Spans that were not sent."""

    def end_by(self, at: float) -> None:
        """Sends nothing after `at`, in monotonic seconds."""
        self._end_by = at

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        now = time.monotonic()
        if now < self._try_at or now > self._end_by:
            self.dropped += len(spans)
            return SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        except Exception:
            log.debug("spans could not be exported", exc_info=True)
            result = SpanExportResult.FAILURE
        self._told(result, len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _told(self, result: SpanExportResult, spans: int) -> None:
        failing = result is not SpanExportResult.SUCCESS
        if failing:
            self.dropped += spans
            self._try_at = time.monotonic() + self._rest
        if failing and not self._failing:
            log.warning("traces cannot be sent to the OpenTelemetry collector; said once until it takes them again")
        elif self._failing and not failing:
            log.info("the OpenTelemetry collector takes traces again; %d spans were dropped", self.dropped)
        self._failing = failing
