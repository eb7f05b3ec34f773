"""A Service of a manifest: its own address, behind which each new connection goes to the next ready pod."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

Endpoint = tuple[str, int]


class ServicePort:
    """Async context manager. endpoints: where connections may go now."""

    def __init__(self, ip: str, port: int, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        self.address = f"{ip}:{port}"
        self.connections = 0
        self._ip, self._port, self._endpoints = ip, port, endpoints
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ServicePort:
        self._server = await asyncio.start_server(self._serve, self._ip, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        writers = [writer]
        try:
            if endpoints := self._endpoints():
                self.connections += 1
                ip, port = endpoints[next(self._turn) % len(endpoints)]
                onward_reader, onward = await asyncio.open_connection(ip, port)
                writers.append(onward)
                await asyncio.gather(_copy(reader, onward), _copy(onward_reader, writer))
        except OSError:
            writer.transport.abort()
        finally:
            for one in writers:
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the one side ends; then the other side is told."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
