"""Probes of a container, asked as a kubelet asks them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tools.manifest import Json

RunInside = Callable[[list[str]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds. ask: whether it succeeds now."""

    ask: Callable[[], Awaitable[bool]]
    delay: float
    period: float
    timeout: float
    failure_threshold: int

    async def holds(self) -> bool:
        """A probe that takes too long has failed."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self.ask()
        except (TimeoutError, OSError, grpc.RpcError):
            return False


def read_probe(spec: Json, ip: str, ports: Mapping[str, int], run: RunInside) -> Probe:
    """ports: by name. run: a command in the container. Raises ValueError for a kind that is not known here."""

    def number(port: int | str) -> int:
        return port if isinstance(port, int) else ports[port]

    if asked := spec.get("grpc"):
        ask = _grpc_probe(f"{ip}:{number(asked['port'])}", asked.get("service", ""))
    elif asked := spec.get("tcpSocket"):
        ask = _tcp_probe(ip, number(asked["port"]))
    elif asked := spec.get("exec"):
        ask = _exec_probe(asked["command"], run)
    else:
        raise ValueError(f"no probe of this kind here: {spec}")
    return Probe(
        ask,
        spec.get("initialDelaySeconds", 0),
        spec.get("periodSeconds", 10),
        spec.get("timeoutSeconds", 1),
        spec.get("failureThreshold", 3),
    )


def _grpc_probe(address: str, service: str) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        # As a kubelet: a new connection each time, and never TLS.
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return ask


def _tcp_probe(ip: str, port: int) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        _, writer = await asyncio.open_connection(ip, port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    return ask


def _exec_probe(command: list[str], run: RunInside) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return await run(command) == 0

    return ask
