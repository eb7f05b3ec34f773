"""The fault proxy does to a connection what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tools.proxy import FaultProxy

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[FaultProxy], Awaitable[Connection]]


@asynccontextmanager
async def echo(address: str) -> AsyncIterator[str]:
    """A server that answers every piece; when its input ends it says "bye" and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(1024):
                writer.write(piece)
            writer.write(b"bye")
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    if address.startswith("unix:"):
        server = await asyncio.start_unix_server(serve, address.removeprefix("unix:"))
        where = address
    else:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        where = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield where
    finally:
        server.close()


@pytest.fixture(params=["tcp", "unix"])
async def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FaultProxy]:
    unix = request.param == "unix"
    upstream = f"unix:{tmp_path}/up" if unix else "127.0.0.1:0"
    listen = f"unix:{tmp_path}/proxy" if unix else "127.0.0.1:0"
    async with echo(upstream) as where, FaultProxy(where, listen) as through:
        yield through


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens connections through a proxy, and closes them in the end."""
    writers: list[asyncio.StreamWriter] = []

    async def opened(proxy: FaultProxy) -> Connection:
        if proxy.address.startswith("unix:"):
            connection = await asyncio.open_unix_connection(proxy.address.removeprefix("unix:"))
        else:
            host, _, port = proxy.address.rpartition(":")
            connection = await asyncio.open_connection(host, int(port))
        writers.append(connection[1])
        return connection

    yield opened
    for writer in writers:
        writer.close()


async def ask(connection: Connection, what: bytes) -> bytes:
    reader, writer = connection
    writer.write(what)
    await writer.drain()
    return await reader.readexactly(len(what))


async def end_of(connection: Connection) -> bytes:
    """What is still read, and then the end of the stream or a reset."""
    reader, _ = connection
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""


async def test_bytes_pass_both_ways(proxy: FaultProxy, connect: Connect) -> None:
    connection = await connect(proxy)
    large = bytes(range(256)) * 1024
    assert await ask(connection, large) == large
    assert proxy.open_connections == proxy.num_connections == 1


async def test_a_stall_holds_bytes_back_until_it_ends(proxy: FaultProxy, connect: Connect) -> None:
    connection = await connect(proxy)
    await ask(connection, b"warm")
    proxy.stall()
    answer = asyncio.ensure_future(ask(connection, b"held"))
    done, _ = await asyncio.wait({answer}, timeout=0.05)
    assert not done
    proxy.resume()
    assert await asyncio.wait_for(answer, 5) == b"held"


async def test_delay_and_bandwidth_take_their_time(proxy: FaultProxy, connect: Connect) -> None:
    loop = asyncio.get_running_loop()
    connection = await connect(proxy)
    await ask(connection, b"warm")
    proxy.upward.delay = 0.05
    proxy.downward.bytes_per_second = 1000
    started = loop.time()
    await ask(connection, b"x" * 50)
    assert loop.time() - started >= 0.1


@pytest.mark.parametrize("end", [FaultProxy.reset, FaultProxy.close_connections])
async def test_connections_end_on_command_and_new_ones_work(
    proxy: FaultProxy, connect: Connect, end: Callable[[FaultProxy], asyncio.Future[None]]
) -> None:
    connection = await connect(proxy)
    await ask(connection, b"warm")
    await end(proxy)
    assert await end_of(connection) == b""
    assert await ask(await connect(proxy), b"again") == b"again"


async def test_a_reset_is_a_reset_and_no_clean_end(connect: Connect) -> None:
    async with echo("127.0.0.1:0") as where, FaultProxy(where) as proxy:
        reader, _ = connection = await connect(proxy)
        await ask(connection, b"warm")
        await proxy.reset()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)


async def test_a_half_close_ends_one_direction_only(proxy: FaultProxy, connect: Connect) -> None:
    connection = await connect(proxy)
    await ask(connection, b"warm")
    proxy.half_close()
    assert await end_of(connection) == b"bye"


async def test_a_connection_is_cut_after_so_many_bytes(proxy: FaultProxy, connect: Connect) -> None:
    proxy.downward.cut_after = 10
    connection = await connect(proxy)
    connection[1].write(b"0123456789abcdef")
    assert await end_of(connection) in (b"", b"0123456789")
    proxy.downward.cut_after = None
    assert await ask(await connect(proxy), b"again") == b"again"


async def test_new_connections_are_refused_on_command(proxy: FaultProxy, connect: Connect) -> None:
    proxy.refuse()
    connection = await connect(proxy)
    assert await end_of(connection) == b""
    proxy.refuse(False)
    assert await ask(await connect(proxy), b"again") == b"again"
