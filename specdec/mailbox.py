"""Between the streams of many schedulers, which live on other threads, and the one thread of a worker's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Mailbox(Generic[Item, Result]):
    """Items come in under the session of their stream; results go out to it. Every method may be called by any thread;
    a session's `deliver` is called on the thread that sends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: list[tuple[int, Item, float]] = []
        self._closed: list[int] = []
        self._sessions: dict[int, Callable[[list[Result]], None]] = {}
        self._last_session = 0
        self._stopped = False

    def attach(self, deliver: Callable[[list[Result]], None]) -> int:
        with self._changed:
            self._last_session += 1
            self._sessions[self._last_session] = deliver
            return self._last_session

    def detach(self, session: int) -> None:
        with self._changed:
            self._sessions.pop(session, None)
            self._closed.append(session)
            self._changed.notify()

    def submit(self, session: int, items: Iterable[Item]) -> None:
        with self._changed:
            now = time.monotonic()
            self._items += [(session, item, now) for item in items]
            self._changed.notify()

    def stop(self) -> None:
        """Ends every `wait` from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def waiting(self) -> bool:
        return bool(self._items or self._closed)

    def take(self) -> tuple[list[tuple[int, Item, float]], list[int]]:
        """All items that came, with their sessions and monotonic times, and the sessions that were closed."""
        with self._changed:
            items, self._items = self._items, []
            closed, self._closed = self._closed, []
            return items, closed

    def send(self, results: Mapping[int, Sequence[Result]]) -> None:
        for session, batch in results.items():
            deliver = self._sessions.get(session)
            if deliver is not None and batch:
                deliver(list(batch))

    def wait(self, timeout: float | None) -> None:
        """Until something came or the mailbox is stopped, at most `timeout` seconds."""
        with self._changed:
            if not (self._items or self._closed or self._stopped):
                self._changed.wait(timeout)
