"""`outrider up` as the thing that is measured: a process of its own, reached through the SDK."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Sequence
from types import TracebackType

from bench.contestants import ContestantFailed
from bench.journal import ROOT
from outrider import AsyncClient

_READY = re.compile(rb"ready at (\S+?:\d+)")


class Up:
    """Async context manager over `outrider up ARGUMENTS`; `client` is connected when it is ready. prefix_cache: whether
    workers without commands of their own among the arguments have it."""

    def __init__(self, *arguments: str, prefix_cache: bool = False) -> None:
        self._arguments = (*arguments, *([] if prefix_cache else _uncached(arguments)))
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self.client = AsyncClient("unused")

    async def __aenter__(self) -> Up:
        command = [
            sys.executable,
            "-m",
            "services.cli.main",
            "up",
            "--grpc-port",
            "0",
            "--http-port",
            "0",
            *self._arguments,
        ]
        self._process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
        try:
            self.client = AsyncClient(await self._address(self._process))
        except asyncio.CancelledError:  # Ctrl-C while it starts
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()
        await self._stop()

    async def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
            await self._process.wait()
        if self._drain is not None:
            await self._drain

    async def _address(self, process: asyncio.subprocess.Process) -> str:
        """Raises ContestantFailed with the last line if the start fails."""
        last = b""
        while process.stderr is not None and (line := await process.stderr.readline()):
            found = _READY.search(line)
            if found and b"[up]" in line:
                self._drain = asyncio.create_task(_read_all(process.stderr))
                return found.group(1).decode()
            last = line
        raise ContestantFailed(f"outrider up ended at its start: {last.decode().strip()}")


def _uncached(arguments: Sequence[str]) -> list[str]:
    """Commands for the roles that have none."""
    command = f"{sys.executable} -m bench.uncached_worker"
    wanted = {"--target-command": f"{command} target --config {{config}}"}
    wanted |= {"--draft-command": f"{command} draft --config {{config}}"}
    return [word for flag, value in wanted.items() if flag not in arguments for word in (flag, value)]


async def _read_all(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
