"""A call as a span of the caller's own trace, where the caller uses OpenTelemetry; else only what it passes on.

The SDK asks for no OpenTelemetry and configures none: with `opentelemetry-api` installed it uses the tracer that the
program has set up, and the context that the program is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from outrider.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span

METHOD = "outrider.v1.GenerationService/Generate"


class ClientCall:
    """metadata: the trace context to send. Ends as what it is told last, and as cancelled if it is told nothing."""

    def __init__(self, span: Span | None, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._span = span
        self._code = grpc.StatusCode.CANCELLED
        self.metadata = metadata

    def finished(self) -> None:
        self._code = grpc.StatusCode.OK

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        self._code = error.code()

    def end(self) -> None:
        """A call that its own program leaves has not failed."""
        if self._span is None:
            return
        self._span.set_attribute("rpc.response.status_code", self._code.name)
        if self._code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", self._code.name)
            self._span.set_status(Status(StatusCode.ERROR, self._code.name))
        self._span.end()


@contextmanager
def client_call(address: str, model: str, traceparent: str, tracestate: str) -> Iterator[ClientCall]:
    """traceparent, tracestate: what the caller was given, for programs that have no OpenTelemetry context of their
    own."""
    call = _start(address, model, traceparent, tracestate)
    try:
        yield call
    finally:
        call.end()


def _start(address: str, model: str, traceparent: str, tracestate: str) -> ClientCall:
    given = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return ClientCall(None, _metadata(given))
    propagator = TraceContextTextMapPropagator()
    above = propagator.extract(given) if given else None
    attributes: dict[str, Any] = {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "server.address": address,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
    }
    if model:
        attributes["gen_ai.request.model"] = model
    tracer = trace.get_tracer("outrider", __version__)
    span = tracer.start_span(METHOD, context=above, kind=trace.SpanKind.CLIENT, attributes=attributes)
    sent: dict[str, str] = {}
    propagator.inject(sent, trace.set_span_in_context(span))
    return ClientCall(span, _metadata(sent))


def _metadata(carrier: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in carrier.items() if value)
