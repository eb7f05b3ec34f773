"""Tracing of one process: what its spans have in common, and where they go.

Spans are made after the fact, with the times at which things began and ended: nothing that serves waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from outrider.version import __version__
from services.telemetry.otlp import resource
from services.telemetry.tracing_context import TraceContext
from services.telemetry.tracing_export import ExportLimits, SpanQueue
from services.telemetry.tracing_span import FinishedSpan, Kind

SCOPE = InstrumentationScope("outrider", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status()
_KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER}


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """endpoint: URL of the collector. role, instance: who we are, as in `otlp.resource`. sample_ratio: share of the
    traces that begin here which are recorded. slow_seconds: a request that takes longer is recorded whatever the
    ratio."""

    endpoint: str
    role: str
    instance: str
    sample_ratio: float = 1.0
    slow_seconds: float = 30.0
    limits: ExportLimits = field(default_factory=ExportLimits)


class Tracing:
    """A `SpanSink` that exports. Any thread may use it."""

    def __init__(self, config: TracingConfig) -> None:
        self.config = config
        self._queue = SpanQueue(config.endpoint, config.limits)
        self._resource = resource(config.role, config.instance)

    def put(self, span: FinishedSpan) -> None:
        self._queue.put(
            ReadableSpan(
                span.name,
                context=_context(span.context, False),
                parent=_context(span.parent, True) if span.parent is not None else None,
                resource=self._resource,
                attributes=span.attributes,
                events=[Event(moment.name, moment.attributes, _nanoseconds(moment.at)) for moment in span.moments],
                kind=_KINDS[span.kind],
                instrumentation_scope=SCOPE,
                status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                start_time=_nanoseconds(span.began),
                end_time=_nanoseconds(span.ended),
            )
        )

    def close(self) -> None:
        """Sends the last spans. Blocks, for a few seconds at most."""
        self._queue.close()


def _context(context: TraceContext, remote: bool) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SpanContext(context.trace_id, context.span_id, remote, _SAMPLED, state)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
