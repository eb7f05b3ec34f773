"""Asks a gateway how its deployment does: the launcher's view of its own start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from outrider.v1 import control_service_pb2 as control
from outrider.v1 import control_service_pb2_grpc as control_grpc
from services.channel import ChannelConfig, ClientTls, open_channel

if TYPE_CHECKING:
    from types import TracebackType

PROBE_SECONDS = 2.0


class StatusProbe:
    """`async with StatusProbe(...) as probe`: one channel to the gateway."""

    def __init__(self, address: str, api_keys: Sequence[str] = (), tls_ca: Path | None = None) -> None:
        """Raises OSError if tls_ca cannot be read."""
        tls = ClientTls(tls_ca) if tls_ca is not None else None
        self._channel = open_channel(address, ChannelConfig(tls=tls))
        self._metadata = (("authorization", f"Bearer {api_keys[0]}"),) if api_keys else ()

    async def __aenter__(self) -> StatusProbe:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def ask(self) -> control.GetStatusResponse | None:
        """None while nobody answers."""
        stub = control_grpc.ControlServiceStub(self._channel)
        try:
            return await stub.GetStatus(
                control.GetStatusRequest(), timeout=PROBE_SECONDS, metadata=self._metadata or None
            )
        except grpc.aio.AioRpcError:
            return None
