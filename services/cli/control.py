"""Commands that ask a scheduler for more than its answers: one channel, with every error as one line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from outrider.errors import from_rpc
from outrider.v1 import control_service_pb2 as pb
from outrider.v1 import control_service_pb2_grpc as pb_grpc
from services.channel import ChannelConfig, ClientTls, open_channel
from services.cli.connection import Connection
from services.rounds import LATEST
from services.start_error import ExitCode, StartError

ANSWER_SECONDS = 5.0

Answer = TypeVar("Answer", bound=Message)
REQUEST_HELP = f"Id of a sequence (`outrider generate` prints it) or of a request, or `{LATEST}` for the latest."


@dataclass(frozen=True, slots=True)
class Control:
    """Each call raises StartError."""

    connection: Connection
    stub: pb_grpc.ControlServiceAsyncStub

    async def status(self, max_sequences: int) -> pb.GetStatusResponse:
        return await self._ask(self.stub.GetStatus, pb.GetStatusRequest(max_sequences=max_sequences))

    async def figures(self, seconds: int = 0) -> pb.GetFiguresResponse:
        return await self._ask(self.stub.GetFigures, pb.GetFiguresRequest(seconds=seconds))

    async def rounds(self, request: str) -> list[pb.SequenceRounds]:
        """At least one."""
        found = await self._ask(self.stub.GetRounds, pb.GetRoundsRequest(request=request))
        if not found.sequences:
            hint = "there was no request yet" if request == LATEST else "only the latest requests are remembered"
            raise StartError(f"nothing is known of {request!r}: {hint}")
        return list(found.sequences)

    async def rounds_within(self, seconds: float) -> list[pb.SequenceRounds]:
        request = pb.GetRoundsRequest()
        request.within.FromNanoseconds(round(seconds * 1e9))
        return list((await self._ask(self.stub.GetRounds, request)).sequences)

    async def _ask(self, call: Callable[..., Awaitable[Answer]], request: Message) -> Answer:
        key = self.connection.api_key
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        try:
            return await call(request, timeout=ANSWER_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise self.connection.failure(from_rpc(error, self.connection.address)) from error


@asynccontextmanager
async def control(connection: Connection) -> AsyncIterator[Control]:
    """Raises StartError."""
    try:
        tls = ClientTls(connection.tls_ca) if connection.tls_ca is not None else None
        channel = open_channel(connection.address, ChannelConfig(keepalive_time=10.0, tls=tls))
    except OSError as error:
        raise StartError(f"cannot read {connection.tls_ca}: {error.strerror}", ExitCode.WRONG_USE) from error
    try:
        yield Control(connection, pb_grpc.ControlServiceStub(channel))
    finally:
        await channel.close(None)
