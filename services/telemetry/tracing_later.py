"""Work that nobody waits for, done by an event loop when nothing else is going on.

A step of a target answers all its sequences at once, and then there is time until the next one. What is put off while
answers are told is done in that time, and in small parts, so that no answer waits for more than one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

QUIET_SECONDS = 0.005
"""Nothing new within so long: the answers are told."""
MOST_POSTPONED = 20
"""So often `QUIET_SECONDS` are waited for quiet; a loop that never has it does the work nonetheless."""
PART = 8
"""Items at a time, about 0.2 ms."""
MAX_WAITING = 8192
"""Items; the oldest fall."""

Item = TypeVar("Item")


class Later(Generic[Item]):
    """Used from one event loop. do: what is done to each item, in the order in which they were put."""

    def __init__(self, do: Callable[[Item], None]) -> None:
        self._do = do
        self._waiting: deque[Item] = deque(maxlen=MAX_WAITING)
        self._armed: asyncio.Handle | None = None
        self._came = False
        self._postponed = 0

    def put(self, item: Item) -> None:
        self._waiting.append(item)
        self._came = True
        if self._armed is None:
            self._postponed = 0
            self._armed = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._look)

    def flush(self) -> None:
        """Does all that waits, at once."""
        while self._waiting:
            self._do(self._waiting.popleft())
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None

    def _look(self) -> None:
        self._armed = None
        came, self._came = self._came, False
        loop = asyncio.get_running_loop()
        if came and self._postponed < MOST_POSTPONED:
            self._postponed += 1
            self._armed = loop.call_later(QUIET_SECONDS, self._look)
            return
        for _ in range(min(PART, len(self._waiting))):
            self._do(self._waiting.popleft())
        if self._waiting:
            self._armed = loop.call_soon(self._look)
