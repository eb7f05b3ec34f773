"""Time that passes only while everything waits: `run_virtually` runs asyncio code on a clock of its own.

Nothing that it runs may wait on a thread or a socket. What is computed takes no time at all, so that every run gives
the same figures, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """Where the loop would sleep, the clock is put forward."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everything waits and nothing will happen any more")
        self._clock.now += max(timeout, 0.0)
        return ready


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` in a loop of its own. `time.monotonic` tells the loop's time meanwhile, to the whole process."""
    clock = _Clock()
    with mock.patch.object(time, "monotonic", clock):
        loop = asyncio.SelectorEventLoop(_Selector(clock))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)
