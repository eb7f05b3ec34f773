"""A command that asks a deployment, as the first span of a trace, where OpenTelemetry's own variables say so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def client_tracing() -> Iterator[None]:
    """Within it the SDK's calls are spans, sent to the collector that the environment names. Without one, or with a
    tracer that is set up already (`opentelemetry-instrument`), nothing is done."""
    endpoint = next((value for name in ENDPOINT_VARIABLES if (value := os.environ.get(name))), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield
        return
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from services.telemetry.otlp import resource
    from services.telemetry.tracing_export import ExportLimits, SpanQueue

    if isinstance(trace.get_tracer_provider(), TracerProvider):
        yield
        return
    queue = SpanQueue(endpoint, ExportLimits())
    provider = TracerProvider(resource=resource("client", f"client-{os.getpid()}"), shutdown_on_exit=False)
    provider.add_span_processor(queue.processor)
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        queue.close()
