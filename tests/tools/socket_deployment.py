"""The same system over real sockets: the scheduler here, every worker a process that a test may kill or stop."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from scheduler.config import SchedulerConfig
from scheduler.entries import Reader
from scheduler.scheduler import Scheduler
from services.links import LinkConfig, link_factory
from specdec.messages import Role
from tools.deployment import SystemUnderTest, quick_config
from tools.proxy import FaultProxy
from tools.recorder import MemoryRecorder
from tools.waiting import until

TESTS = Path(__file__).resolve().parents[1]


class WorkerProcess:
    """One `python -m tools.MODULE` with its arguments; a module of another package is named in full. An async context
    manager that belongs to no event loop, so that tests may share one."""

    def __init__(self, role: Role, module: str, address: str, arguments: Sequence[str]) -> None:
        self.role = role
        self.address = address
        self._module = module if "." in module else f"tools.{module}"
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> WorkerProcess:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def pid(self) -> int:
        """Raises RuntimeError if it was not started."""
        if self._process is None:
            raise RuntimeError(f"{self._module} was not started")
        return self._process.pid

    async def start(self) -> None:
        """Returns when it listens. Raises RuntimeError if it ends before that."""
        line = await asyncio.to_thread(self._first_line)
        if not line.startswith(b"ready "):
            raise RuntimeError(f"{self._module} ended at its start with code {await self.ended()}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and waits until it is gone. Harmless if it is."""
        if self._process is not None:
            with self._process as process:
                process.kill()

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.to_thread(self._process.wait) if self._process else 0

    def _first_line(self) -> bytes:
        environment = os.environ | {
            "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "GRPC_VERBOSITY": "NONE",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, "--listen", self.address, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        return self._process.stdout.readline() if self._process.stdout else b""


class SocketDeployment(SystemUnderTest):
    """Async context manager. targets, drafts: per worker the module and its arguments, as one string with blanks.

    proxied: the scheduler reaches each worker through a fault proxy, `proxies` in the order of `processes`.
    """

    def __init__(
        self,
        targets: Sequence[str] = ("table_target",),
        drafts: Sequence[str] = (),
        config: SchedulerConfig | None = None,
        links: LinkConfig | None = None,
        proxied: bool = False,
        readers: Sequence[Reader] = (),
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ot", dir="/tmp"))
        self._exits = AsyncExitStack()
        recorder = MemoryRecorder()
        scheduler = Scheduler(config or quick_config(), link_factory(links), recorder, readers=readers)
        super().__init__(scheduler, recorder)
        self.targets = [self._make(Role.TARGET, "t", i, command) for i, command in enumerate(targets)]
        self.drafts = [self._make(Role.DRAFT, "d", i, command) for i, command in enumerate(drafts)]
        self.proxies = [FaultProxy(process.address) for process in self.processes if proxied]

    async def __aenter__(self) -> SocketDeployment:
        try:
            await asyncio.gather(*(process.start() for process in self.processes))
            await self.scheduler.start()
            for proxy in self.proxies:
                await self._exits.enter_async_context(proxy)
            for process, address in zip(self.processes, self.addresses, strict=True):
                self.scheduler.add_worker(process.role, address)
            await until(self.settled, "every worker is ready or refused")
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def processes(self) -> list[WorkerProcess]:
        return [*self.targets, *self.drafts]

    @property
    def addresses(self) -> list[str]:
        """Where the scheduler reaches the processes."""
        return [proxy.address for proxy in self.proxies] or [process.address for process in self.processes]

    def _make(self, role: Role, prefix: str, index: int, command: str) -> WorkerProcess:
        module, *arguments = command.split()
        address = f"unix:{self._folder}/{prefix}{index}"
        return WorkerProcess(role, module, address, ["--worker-id", f"{role.value}-{index}", *arguments])

    async def _close(self) -> None:
        await self.scheduler.close()
        await self._exits.aclose()
        await asyncio.gather(*(process.kill() for process in self.processes))
        shutil.rmtree(self._folder, ignore_errors=True)
