"""A deployment with table models over real sockets: workers, and one or more real scheduler processes in front."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from bench.journal import ROOT
from outrider import AsyncClient

sys.path.insert(0, str(ROOT / "tests"))

from specdec.messages import Role
from tools.process import SECRET
from tools.socket_deployment import WorkerProcess
from tools.waiting import until


class SchedulerProcess:
    """One `bench.scheduler_process`; `client` talks to its public API. times: watches its rounds."""

    def __init__(
        self, folder: Path, name: str, workers: Sequence[WorkerProcess], settings: Mapping[str, Any], times: bool
    ) -> None:
        self._settings_file = folder / f"{name}.yaml"
        self._times_file = folder / f"{name}.times" if times else None
        roles = {Role.TARGET: "targets", Role.DRAFT: "drafters"}
        addresses: dict[str, list[str]] = {"targets": [], "drafters": []}
        for worker in workers:
            addresses[roles[worker.role]].append(worker.address)
        content = {"secret": SECRET.decode(), "grpc_port": 0, "http_port": 0, "audit_share": 0.0, "log_level": "error"}
        self._settings_file.write_text(yaml.safe_dump({"scheduler": {**content, **addresses, **settings}}))
        self._times_read = 0
        self._num_workers = len(workers)
        self._process: asyncio.subprocess.Process | None = None
        self.client = AsyncClient("unused")

    async def start(self) -> None:
        """Returns when every worker is ready. Raises RuntimeError if it ends before that."""
        words = [sys.executable, "-m", "bench.scheduler_process", "--settings", str(self._settings_file)]
        if self._times_file:
            words += ["--times", str(self._times_file)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OUTRIDER_") or k == "OUTRIDER_HOME"}
        self._process = await asyncio.create_subprocess_exec(
            *words, cwd=ROOT, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        line = await self._process.stdout.readline() if self._process.stdout else b""
        if not line.startswith(b"ready "):
            raise RuntimeError(f"the scheduler process ended at its start with code {await self._process.wait()}")
        self.client = AsyncClient(line.decode().split()[1])
        await until(self._complete, "every worker is ready", patience=30.0)

    @property
    def cpu_seconds(self) -> float:
        """Of this process alone, since its start: what getrusage tells it of itself."""
        if self._process is None:
            raise RuntimeError("the scheduler process was not started")
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def round_times(self) -> list[tuple[float, float]]:
        """Milliseconds of each round so far that was watched: draft to verify, verdict to event."""
        if self._times_file is None:
            return []
        return _times(self._times_file.read_text())

    def new_round_times(self) -> list[tuple[float, float]]:
        """As `round_times`, those since it was asked last."""
        if self._times_file is None:
            return []
        with self._times_file.open() as file:
            file.seek(self._times_read)
            text = file.read()
            self._times_read = file.tell()
        return _times(text)

    async def close(self) -> None:
        await self.client.close()
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(10):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]

    async def _complete(self) -> bool:
        workers = (await self.client.status()).workers
        return sum(worker.state == "ready" for worker in workers) == self._num_workers


def _times(text: str) -> list[tuple[float, float]]:
    pairs = [line.split() for line in text.splitlines()]
    return [(float(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2]


class TableSystem:
    """Async context manager. targets, drafts: per worker its module and arguments, as one string with blanks.
    schedulers: settings of each scheduler process; `watched` are those whose rounds are timed."""

    def __init__(
        self,
        targets: Sequence[str],
        drafts: Sequence[str],
        schedulers: Mapping[str, Mapping[str, Any]],
        watched: Sequence[str] = (),
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="otb", dir="/tmp"))
        self._exits = AsyncExitStack()
        self.targets = [self._worker(Role.TARGET, i, command) for i, command in enumerate(targets)]
        self.drafts = [self._worker(Role.DRAFT, i, command) for i, command in enumerate(drafts)]
        self.schedulers = {
            name: SchedulerProcess(self._folder, name, [*self.targets, *self.drafts], settings, name in watched)
            for name, settings in schedulers.items()
        }

    async def __aenter__(self) -> TableSystem:
        self._exits.callback(shutil.rmtree, self._folder, ignore_errors=True)
        try:
            for worker in (*self.targets, *self.drafts):
                self._exits.push_async_callback(worker.kill)
                await worker.start()
            for scheduler in self.schedulers.values():
                self._exits.push_async_callback(scheduler.close)
                await scheduler.start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    def _worker(self, role: Role, index: int, command: str) -> WorkerProcess:
        module, *arguments = command.split()
        address = f"unix:{self._folder}/{role.value}{index}"
        return WorkerProcess(role, module, address, ["--worker-id", f"{role.value}-{index}", *arguments])
