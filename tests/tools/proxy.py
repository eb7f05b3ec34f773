"""A TCP and unix proxy that makes the network bad on command: delay, stall, half-close, reset, cut, bandwidth."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType

PIECE = 16 * 1024


@dataclass(slots=True)
class Weather:
    """How one direction treats its bytes; may be changed while connections are open. Neutral as it is made.

    delay: seconds added to each piece. bytes_per_second: 0 is unlimited. cut_after: bytes of a connection after which
    it is reset, counted from its start; None is never.
    """

    delay: float = 0.0
    bytes_per_second: float = 0.0
    cut_after: int | None = None


class FaultProxy:
    """Forwards every connection on `address` to `upstream`. Addresses: "host:port" or "unix:/path".

    upward: the weather from client to server; downward: back. An async context manager.
    """

    def __init__(self, upstream: str, listen: str = "127.0.0.1:0") -> None:
        self.upstream = upstream
        self.address = listen
        self.upward = Weather()
        self.downward = Weather()
        self.num_connections = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pairs: set[_Pair] = set()
        self._server: asyncio.Server | None = None
        self._refusing = False

    async def __aenter__(self) -> FaultProxy:
        if self.address.startswith("unix:"):
            self._server = await asyncio.start_unix_server(self._accept, self.address.removeprefix("unix:"))
        else:
            host, _, port = self.address.rpartition(":")
            self._server = await asyncio.start_server(self._accept, host, int(port))
            self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is None:
            return
        self._server.close()
        await self.reset()
        await self._server.wait_closed()

    @property
    def open_connections(self) -> int:
        return len(self._pairs)

    def stall(self) -> None:
        """No byte passes either way; connections stay open, new ones too."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def refuse(self, refusing: bool = True) -> None:
        """New connections are reset at once; open ones go on."""
        self._refusing = refusing

    async def reset(self) -> None:
        """RST on both sides of every connection (on unix sockets: a close without a farewell)."""
        await self._end(reset=True)

    async def close_connections(self) -> None:
        """FIN on both sides of every connection."""
        await self._end(reset=False)

    def half_close(self) -> None:
        """FIN towards the server only: the client's direction ends, the other goes on."""
        for pair in self._pairs:
            pair.half_close()

    async def _end(self, reset: bool) -> None:
        pairs = list(self._pairs)
        for pair in pairs:
            pair.end(reset)
        await asyncio.gather(*(pair.ended.wait() for pair in pairs))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._refusing:
            _abort(writer, reset=True)
            return
        try:
            if self.upstream.startswith("unix:"):
                up_reader, up_writer = await asyncio.open_unix_connection(self.upstream.removeprefix("unix:"))
            else:
                host, _, port = self.upstream.rpartition(":")
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _abort(writer, reset=True)
            return
        pair = _Pair(writer, up_writer)
        self._pairs.add(pair)
        try:
            await pair.run(
                self._pump(reader, up_writer, self.upward, pair), self._pump(up_reader, writer, self.downward, pair)
            )
        finally:
            self._pairs.discard(pair)
            pair.ended.set()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, weather: Weather, pair: _Pair
    ) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError, OSError):
            while piece := await reader.read(PIECE):
                if weather.delay:
                    await asyncio.sleep(weather.delay)
                if weather.bytes_per_second:
                    await asyncio.sleep(len(piece) / weather.bytes_per_second)
                await self._flowing.wait()
                if weather.cut_after is not None and passed + len(piece) > weather.cut_after:
                    writer.write(piece[: max(weather.cut_after - passed, 0)])
                    await writer.drain()
                    pair.end(reset=True)
                    return
                passed += len(piece)
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()


class _Pair:
    """The two connections that one client has through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.ended = asyncio.Event()
        self._client = client
        self._server = server
        self._pumps: list[asyncio.Task[None]] = []

    async def run(self, *pumps: Coroutine[None, None, None]) -> None:
        """Until both directions have ended."""
        self._pumps = [asyncio.ensure_future(pump) for pump in pumps]
        try:
            await asyncio.gather(*self._pumps, return_exceptions=True)
        finally:
            for writer in (self._client, self._server):
                writer.close()

    def end(self, reset: bool) -> None:
        for writer in (self._client, self._server):
            _abort(writer, reset)
        for pump in self._pumps:
            pump.cancel()

    def half_close(self) -> None:
        if self._server.can_write_eof() and not self._server.is_closing():
            self._server.write_eof()


def _abort(writer: asyncio.StreamWriter, reset: bool) -> None:
    if not reset:
        writer.close()
        return
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
