"""The pool of processes on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from services.deployment import child_spec
from services.pools.worker import WorkerSpec
from services.supervisor import Supervisor


class LocalPool:
    """Implements `Pool` over a supervisor, which may have other children too."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        """folder: private; for the settings files of the workers."""
        self._supervisor = supervisor
        self._folder = folder
        self._names: list[str] = []
        self.failure: asyncio.Future[None] = supervisor.failure

    async def start(self, specs: Sequence[WorkerSpec]) -> None:
        for spec in specs:
            await self.add(spec)

    def settle(self) -> None:
        self._supervisor.settle()

    async def add(self, spec: WorkerSpec) -> None:
        self._supervisor.start([child_spec(self._folder, spec.name, spec.settings, spec.command)])
        self._names.append(spec.name)

    async def remove(self, name: str, seconds: float) -> None:
        self._names.remove(name)
        await self._supervisor.end([name], seconds)

    async def stop(self, seconds: float) -> None:
        names, self._names = self._names, []
        await self._supervisor.end(names, seconds)

    def kill(self) -> None:
        self._supervisor.kill()

    async def close(self) -> None:
        """The supervisor closes with its owner."""
