"""A server with vLLM's HTTP API and no model, run as a process: `streaming_server.py FOLDER MODE --port PORT`.

MODE: `serve`; `broken` (ends at its start); `silent` (never healthy); `erring` (breaks off its answers). It has a child
of its own that ignores SIGTERM and writes "up" into the pipe FOLDER/child. It answers when two requests have come.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOGETHER = 2
CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open(sys.argv[1], "w")
held.write("up")
held.flush()
print("up", flush=True)
time.sleep(600)
"""


class Server:
    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._barrier = asyncio.Barrier(TOGETHER)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        _, path, _ = head.split(maxsplit=2)
        length = next((line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length")), "0")
        body = await reader.readexactly(int(length))
        if path == "/health":
            self._head(writer, 503 if self._mode == "silent" else 200)
        elif path == "/version":
            self._head(writer, 200)
            writer.write(b'{"version": "1.2.3"}')
        else:
            await self._barrier.wait()
            self._head(writer, 200)
            await self._answer(json.loads(body), writer)
        await writer.drain()
        writer.close()

    async def _answer(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """The length of the prompt, counted on; one token less where a stop token would end the answer."""
        first = len(request["messages"][0]["content"])
        held = request["ignore_eos"] and request["min_tokens"] == request["max_tokens"] and request["stream"]
        for i in range(request["max_tokens"] - (not held)):
            event = {"choices": [{"delta": {"content": "x"}, "token_ids": [first + i]}]}
            if self._mode == "erring" and i == 1:
                event = {"error": {"message": "out of blocks"}}  # type: ignore[dict-item]
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")

    def _head(self, writer: asyncio.StreamWriter, status: int) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".encode())


async def serve(mode: str, port: int) -> None:
    server = await asyncio.start_server(Server(mode).handle, "127.0.0.1", port)
    await server.serve_forever()


def main(folder: Path, mode: str, port: int) -> None:
    if mode == "broken":
        print("loading weights")
        sys.exit("no such model")
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder / "child")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    asyncio.run(serve(mode, port))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]))
