"""The calls that a process answers, each the span above what is done for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.telemetry.tracing_context import Call, current_call, new_trace, parse
from services.telemetry.tracing_span import Attributes, FinishedSpan, Kind, SpanSink


class Calls:
    """Used from one event loop. slow_seconds, sample_ratio: as in `TracingConfig`."""

    def __init__(self, sink: SpanSink, sample_ratio: float, slow_seconds: float) -> None:
        self._sink = sink
        self._sample_ratio = sample_ratio
        self._slow_seconds = slow_seconds
        self._open: dict[int, Call] = {}

    def of(self, span_id: int) -> Call | None:
        return self._open.get(span_id)

    @contextmanager
    def answering(self, traceparent: str, tracestate: str) -> Iterator[Call]:
        """One call, from its arrival on; `end` it inside. Who called decides whether it is sampled; where nobody did,
        the ratio does."""
        parent = parse(traceparent, tracestate)
        context = new_trace(self._sample_ratio) if parent is None else parent.child()
        call = Call(context, parent, time.time())
        self._open[context.span_id] = call
        token = current_call.set(call)
        try:
            yield call
        finally:
            current_call.reset(token)
            del self._open[context.span_id]

    def end(self, call: Call, name: str, attributes: Attributes, error: str = "") -> None:
        """error: why it failed, if it did. Recorded if it is sampled, failed or slow, or if one of its sequences was
        for such a reason."""
        error = error or call.error
        ended = time.time()
        slow = ended - call.started >= self._slow_seconds
        if call.context.sampled or error or slow or call.kept:
            span = FinishedSpan(name, call.context, call.parent, call.started, ended, attributes, Kind.SERVER, error)
            self._sink.put(span)
