"""Keeps a set of processes running: starts them, restarts the dead with back-off, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.child import Child, ChildSpec

GUARD = Path(__file__).with_name("guard.py")
FIRST_DELAY = 0.5
LONGEST_DELAY = 10.0
STEADY_SECONDS = 30.0
"""A child that ran for so long starts again after FIRST_DELAY."""
KILL_SECONDS = 5.0
_START_FAILURES = (1, 2, 127)
"""Exit codes by which a child says that it cannot start as configured."""


class Guard:
    """The process that kills what is left and removes `folder` if this one is killed (`services.guard`)."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", str(GUARD), str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Removes the folder, and kills what is left of the groups."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()


class ChildFailed(Exception):
    """A child ended before the start was complete; `complaint` is its own last word."""

    def __init__(self, name: str, code: int, complaint: str) -> None:
        super().__init__(f"{name} ended with {describe_exit(code)}" + (f": {complaint}" if complaint else ""))
        self.name, self.code, self.complaint = name, code, complaint


def describe_exit(code: int) -> str:
    """ "exit code 1" or "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Supervisor:
    """Used from one event loop. `failure` gets a ChildFailed if a child cannot start, until `settle` is called."""

    def __init__(self, folder: Path, on_line: Callable[[str, str], None], say: Callable[[str, str], None]) -> None:
        """folder: removed at the end, however that comes. on_line: a child's output, called from threads.
        say(name, message): what happens to a child, for the log."""
        self._loop = asyncio.get_running_loop()
        self._on_line, self._say = on_line, say
        self._children: dict[str, Child] = {}
        self._delays: dict[str, float] = {}
        self._restarts: dict[str, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._leaving: set[str] = set()
        self._stopping = False
        self._settled = False
        self._guard = Guard(folder)
        self.failure: asyncio.Future[None] = self._loop.create_future()

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def start(self, specs: Sequence[ChildSpec]) -> None:
        for spec in specs:
            self._leaving.discard(spec.name)
            self._start(spec)

    def settle(self) -> None:
        """The start is complete: whatever ends from now on is started again."""
        self._settled = True
        self.failure.cancel()

    async def end(self, names: Sequence[str], seconds: float) -> None:
        """Ends the named children for good: SIGTERM, so many seconds to drain, SIGKILL."""
        self._leaving.update(names)
        for name in names:
            if handle := self._restarts.pop(name, None):
                handle.cancel()
        self._signal(names, signal.SIGTERM)
        if not await self._ended(names, seconds):
            self._signal(names, signal.SIGKILL)
            await self._ended(names, KILL_SECONDS)

    async def stop(self, stages: Sequence[tuple[Sequence[str], float]]) -> None:
        """Ends the named children, stage by stage, as `end` does. Then all others."""
        self._stopping = True
        for handle in self._restarts.values():
            handle.cancel()
        for names, seconds in [*stages, (tuple(self._children), KILL_SECONDS)]:
            await self.end(names, seconds)

    def kill(self) -> None:
        """Ends everything at once."""
        self._stopping = True
        self._signal(tuple(self._children), signal.SIGKILL)

    def close(self) -> None:
        """Removes the folder. Call last."""
        self.kill()
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # looked at, so that asyncio does not complain
        self._guard.close()

    def _start(self, spec: ChildSpec) -> None:
        child = Child(spec, self._on_line, self._exit_in_thread)
        self._guard.add(child.pid)
        self._children[spec.name] = child

    def _exit_in_thread(self, child: Child, code: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has the launcher
            self._loop.call_soon_threadsafe(self._exited, child, code)

    def _exited(self, child: Child, code: int) -> None:
        name = child.spec.name
        child.signal(signal.SIGKILL)  # what it left in its group, whose number stays taken while there is anything
        self._guard.remove(child.pid)
        self._children.pop(name, None)
        self._changed.set()
        if self._stopping or name in self._leaving:
            return
        if not self._settled and code in _START_FAILURES:
            if not self.failure.done():
                self.failure.set_exception(ChildFailed(name, code, child.complaint))
            return
        if time.monotonic() - child.started >= STEADY_SECONDS:
            self._delays.pop(name, None)
        delay = self._delays.get(name, FIRST_DELAY)
        self._delays[name] = min(2 * delay, LONGEST_DELAY)
        self._say(name, f"ended with {describe_exit(code)}; starts again in {delay:g} s")
        self._restarts[name] = self._loop.call_later(delay, self._restart, child.spec)

    def _restart(self, spec: ChildSpec) -> None:
        try:
            self._start(spec)
        except OSError as error:
            self._say(spec.name, f"cannot start ({error}); tried again in {LONGEST_DELAY:g} s")
            self._restarts[spec.name] = self._loop.call_later(LONGEST_DELAY, self._restart, spec)

    def _signal(self, names: Sequence[str], number: signal.Signals) -> None:
        for name in names:
            if child := self._children.get(name):
                child.signal(number)

    async def _ended(self, names: Sequence[str], seconds: float) -> bool:
        """False if some still run after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while any(name in self._children for name in names):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
