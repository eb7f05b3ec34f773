"""A call's span tells how the call ended, also where grpc.aio lets a broken stream look like a clean end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from typer.testing import CliRunner

from outrider.client import AsyncClient
from scheduler.errors import InvalidRequest, SequenceFailed
from services.cli.generate import app
from services.errors import abort
from services.interceptors import TracingInterceptor
from services.telemetry.tracing_calls import Calls
from services.telemetry.tracing_span import FinishedSpan
from tools.scripted_scheduler import ScriptedScheduler
from tools.served_gateway import served_gateway
from tools.waiting import until

STREAM = "/outrider.v1.TargetService/Verify"
PARENT = f"00-{1:032x}-{2:016x}-01"


class Spans:
    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def put(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    async def next(self) -> FinishedSpan:
        await until(lambda: bool(self.spans), "the call is told")
        return self.spans.pop(0)


class _Streams(grpc.GenericRpcHandler[Any, Any] if TYPE_CHECKING else grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message with itself, and those that are orders with what they say."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.send_initial_metadata(())
        async for request in requests:
            match request:
                case b"refuse":
                    await abort(context, InvalidRequest("n", "n is wrong"))
                case b"fail":
                    await abort(context, SequenceFailed("it failed"))
                case b"raise":
                    raise ValueError("a bug")
                case b"hang":
                    await asyncio.Event().wait()
            await context.write(request)


@asynccontextmanager
async def _served(spans: Spans) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[TracingInterceptor(Calls(spans, 1.0, 60.0))])
    server.add_generic_rpc_handlers([_Streams()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def _end(address: str, how: str) -> None:
    """One stream with one message, ended in this way."""
    order = how if how in ("refuse", "fail", "raise") else "hang" if how.startswith("hanging") else "echo"
    channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    open_stream: Any = channel.stream_stream  # its stubs want what it does not need
    await channel.channel_ready()
    call = open_stream(STREAM)(timeout=2.0 if how.endswith("deadline") else None)
    await call.write(order.encode())
    if order == "echo":
        await call.read()
    match how.rpartition(" ")[2]:
        case "close":
            await call.done_writing()
            await call.code()
        case "cancel":
            await call.initial_metadata()
            call.cancel()
        case "drop":
            await call.initial_metadata()
            await channel.close(None)
        case _:
            await call.code()
    await channel.close(None)


@pytest.mark.parametrize(
    ("how", "code", "failed"),
    [
        ("close", "OK", False),
        ("cancel", "CANCELLED", False),
        ("hanging cancel", "CANCELLED", False),
        ("drop", "CANCELLED", False),
        ("hanging drop", "CANCELLED", False),
        ("deadline", "DEADLINE_EXCEEDED", True),
        ("hanging deadline", "DEADLINE_EXCEEDED", True),
        ("refuse", "INVALID_ARGUMENT", False),
        ("fail", "INTERNAL", True),
        ("raise", "UNKNOWN", True),
    ],
)
async def test_a_stream_has_the_status_that_its_caller_saw(how: str, code: str, failed: bool) -> None:
    spans = Spans()
    async with _served(spans) as address:
        await _end(address, how)
        span = await spans.next()
    assert span.name == STREAM.removeprefix("/")
    assert span.attributes["rpc.response.status_code"] == code
    assert bool(span.error) is failed


async def test_what_the_sdk_is_given_it_passes_on() -> None:
    spans = Spans()
    async with (
        served_gateway(ScriptedScheduler(), tracing=TracingInterceptor(Calls(spans, 0.0, 60.0))) as address,
        AsyncClient(address) as client,
    ):
        await client.complete(token_ids=[1, 2], max_tokens=4, traceparent=PARENT, tracestate="a=b")
        span = await spans.next()
        await client.complete(token_ids=[1, 2], max_tokens=4)
    assert span.parent is not None
    assert span.parent.traceparent == PARENT
    assert span.context.state == "a=b"
    assert not spans.spans


async def test_generate_joins_the_trace_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    monkeypatch.setenv("TRACEPARENT", PARENT)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = TracingInterceptor(Calls(spans, 0.0, 60.0))
    async with served_gateway(ScriptedScheduler(), tracing=tracing) as address:
        command = ["--address", address, "--raw", "--max-tokens", "4", "w1 w2"]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0, result.output
        span = await spans.next()
    assert span.parent is not None
    assert span.parent.traceparent == PARENT


def test_the_sdk_needs_no_opentelemetry() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from outrider.tracing import client_call
with client_call("a", "m", "00-1-2-01", "") as call:
    assert call.metadata == (("traceparent", "00-1-2-01"),), call.metadata
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_process_without_a_collector_loads_no_opentelemetry_sdk() -> None:
    program = """
import sys
import services.worker_process, services.telemetry.tracing_start, services.interceptors, services.cli.generate
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
