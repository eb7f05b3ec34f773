"""A network's delay: `python -m tools.delay_line --listen unix:/a --upstream unix:/b --delay 0.005`.

Unlike the fault proxy's weather it delays without narrowing: what comes later is under way at the same time. It is a
process of its own, so that it takes no time from those that it joins.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import deque

from tools.process import end_with_starter, say_ready

PIECE = 1 << 16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Every piece leaves `delay` seconds after it came."""
    pieces: deque[tuple[float, bytes]] = deque()
    came = asyncio.Event()

    async def leave() -> None:
        while True:
            while not pieces:
                came.clear()
                await came.wait()
            due, piece = pieces[0]
            await asyncio.sleep(max(due - time.monotonic(), 0))
            pieces.popleft()
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    leaving = asyncio.create_task(leave())
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            pieces.append((time.monotonic() + delay, piece))
            came.set()
        pieces.append((time.monotonic() + delay, b""))
        came.set()
        await leaving
    leaving.cancel()
    writer.close()


async def serve(listen: str, upstream: str, delay: float) -> None:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(upstream.removeprefix("unix:"))
        await asyncio.gather(pump(reader, up_writer, delay), pump(up_reader, writer, delay))

    server = await asyncio.start_unix_server(join, listen.removeprefix("unix:"))
    await say_ready(listen)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True, help="unix:PATH")
    parser.add_argument("--upstream", required=True, help="unix:PATH")
    parser.add_argument("--delay", type=float, required=True, help="seconds, each way")
    options = parser.parse_args()
    end_with_starter()
    asyncio.run(serve(options.listen, options.upstream, options.delay))


if __name__ == "__main__":
    main()
