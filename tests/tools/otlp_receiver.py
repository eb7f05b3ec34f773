"""An OpenTelemetry collector that remembers spans: OTLP over gRPC on a free port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tools.waiting import until

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Ids are hexadecimal, parent_id "" for none; times are nanoseconds since the epoch. error: of its status."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Value]
    resource: dict[str, Value]
    error: str | None
    events: tuple[str, ...]
    is_server: bool

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])


@dataclass(slots=True)
class Receiver:
    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    async def until_named(self, *names: str) -> None:
        """Waits until there is at least one span of each name."""
        await until(lambda: all(map(self.named, names)), f"spans named {', '.join(names)} arrive")


def orphans(spans: Iterable[ReceivedSpan]) -> list[ReceivedSpan]:
    """Those whose parent is not among them, nor are they without one."""
    spans = list(spans)
    known = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id and span.parent_id not in known]


@asynccontextmanager
async def otlp_receiver(port: int = 0) -> AsyncIterator[Receiver]:
    """port 0: a free one."""
    receiver = Receiver()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_TraceServiceServicer_to_server(_Servicer(receiver), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    receiver.endpoint = f"http://127.0.0.1:{port}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0)


class _Servicer(pb_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                self._receiver.spans += [_span(span, resource) for span in scope_spans.spans]
        return pb.ExportTraceServiceResponse()


def _span(span: trace_pb2.Span, resource: dict[str, Value]) -> ReceivedSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        resource,
        span.status.message if failed else None,
        tuple(event.name for event in span.events),
        span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind == "array_value":
            found[pair.key] = tuple(value.string_value for value in pair.value.array_value.values)
        elif kind is not None:
            found[pair.key] = getattr(pair.value, kind)
    return found
