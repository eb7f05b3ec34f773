"""A worker's place in a Ray cluster: an actor that runs the worker's process beside it and reports what happens to it.

The process is the same command with the same settings as in the local pool, and serves gRPC and holds its lease by
itself. So neither it nor the scheduler loads Ray, and no token can pass through it. If the actor is killed the process
dies with it (`services.leash`), and Ray starts both again, here or on another node.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import ray

from services.deployment import child_spec, private_folder
from services.pools.worker import WorkerSpec
from services.supervisor import ChildFailed, Supervisor

MOST_EVENTS = 2000
"""Unread ones are kept up to here; then the oldest are dropped."""


class EventKind(Enum):
    LINE = "line"
    """The process wrote it."""
    SAID = "said"
    """Its supervisor says it."""
    FAILED = "failed"
    """It cannot start as configured; the text is its complaint."""


@dataclass(frozen=True, slots=True)
class Event:
    """code: the exit code of a failed start."""

    kind: EventKind
    text: str
    code: int = 0


class WorkerActor:
    """All methods run on the actor's event loop. `events` is called again and again, the others now and then."""

    def __init__(self, spec: WorkerSpec, networked: bool, folder: Path) -> None:
        """networked: listen at a free port of this node; else at the address that the settings name, with what it
        keeps in `folder`, which its owner removes."""
        self._spec, self._networked, self._parent = spec, networked, folder
        self._supervisor: Supervisor | None = None
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._arrived = asyncio.Event()

    async def events(self, settled: bool) -> list[Event]:
        """Waits for something to happen; the first call starts the process. settled: see `Pool.settle`."""
        supervisor = self._supervisor or self._start()
        if settled:
            supervisor.settle()
        await self._arrived.wait()
        self._arrived.clear()
        events = list(self._events)
        self._events.clear()
        return events

    async def settle(self) -> None:
        if self._supervisor is not None:
            self._supervisor.settle()

    async def end(self, seconds: float) -> None:
        """Lets the process drain for so many seconds at most."""
        if self._supervisor is not None:
            await self._supervisor.end([self._spec.name], seconds)
            self._supervisor.close()

    def _start(self) -> Supervisor:
        loop = asyncio.get_running_loop()
        # Ray may kill our guard together with us, before it has removed the folder.
        folder = private_folder() if self._networked else Path(tempfile.mkdtemp(dir=self._parent))

        def on_line(name: str, line: str) -> None:
            loop.call_soon_threadsafe(self._add, Event(EventKind.LINE, line))

        supervisor = Supervisor(folder, on_line, lambda name, message: self._add(Event(EventKind.SAID, message)))
        supervisor.failure.add_done_callback(self._failed)
        self._supervisor = supervisor
        settings = self._spec.settings
        if self._networked:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            settings = settings.model_copy(update={"listen": f"{host}:0"})
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, after what was reserved; ours are in the settings
        supervisor.start([child_spec(folder, self._spec.name, settings, self._spec.command)])
        return supervisor

    def _failed(self, failure: asyncio.Future[None]) -> None:
        error = None if failure.cancelled() else failure.exception()
        if isinstance(error, ChildFailed):
            self._add(Event(EventKind.FAILED, error.complaint or str(error), error.code))

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()
