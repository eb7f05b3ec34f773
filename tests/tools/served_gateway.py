"""A gateway behind a real socket, over a scripted scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from outrider.v1 import control_service_pb2_grpc as control_grpc
from outrider.v1 import generation_service_pb2_grpc as generation_grpc
from scheduler.scheduler import Scheduler
from services import control_servicer, generation_servicer
from services.control_servicer import SchedulerControlServicer
from services.gateway import Gateway
from services.generation_servicer import GenerationServicer
from services.interceptors import ApiKeyInterceptor, TracingInterceptor
from services.server import Server, ServerConfig, TlsFiles
from tools.scripted_scheduler import ScriptedScheduler


@asynccontextmanager
async def served_gateway(
    scheduler: ScriptedScheduler | Scheduler,
    api_keys: Sequence[str] = (),
    tls: TlsFiles | None = None,
    tracing: TracingInterceptor | None = None,
) -> AsyncIterator[str]:
    """Yields the address."""
    interceptors: list[ApiKeyInterceptor | TracingInterceptor] = [ApiKeyInterceptor(api_keys)] if api_keys else []
    interceptors += [tracing] if tracing else []
    server = Server(ServerConfig(("127.0.0.1:0",), tls=tls), interceptors)
    generation_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(Gateway(scheduler)), server.grpc)
    control_grpc.add_ControlServiceServicer_to_server(SchedulerControlServicer(scheduler, "0.1"), server.grpc)
    (address,) = await server.start((generation_servicer.SERVICE_NAME, control_servicer.SERVICE_NAME))
    try:
        yield address
    finally:
        await server.drain(0)
