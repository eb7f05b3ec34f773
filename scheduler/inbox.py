"""What comes to one sequence, in order: results of its workers, the loss of one, or the error that ends it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Union

from scheduler.worker import AnyResult, Worker

Message = Union[tuple[Worker, AnyResult], tuple[Worker, None]]
"""A worker's result; None: its stream broke."""


class Inbox:
    """Of one reader. Times are monotonic seconds.

    Its alarm may ring too early, and then is set anew: so a round, whose limits lie ever later, costs no timer.
    """

    def __init__(self) -> None:
        self._messages: deque[Message | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._resting = self._looks_up = False
        self._alarm: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def deliver(self, worker: Worker, result: AnyResult) -> None:
        self._put((worker, result))

    def lost(self, worker: Worker) -> None:
        """That worker's stream broke."""
        self._put((worker, None))

    @property
    def idle(self) -> bool:
        """All that came was dealt with: what comes now may be dealt with at once."""
        return self._resting and not self._messages

    def rest(self) -> None:
        """Its reader has dealt with all that it read, and is away with what came of it."""
        self._resting = True

    def end(self, error: Exception) -> None:
        """The sequence is given up."""
        self._put(error)

    async def next(self, until: Callable[[], float]) -> Message | None:
        """What came first; None if nothing did until then, or if its reader is to look up before it reads on. Raises
        the error that ends the sequence."""
        self._resting = True
        if not self._messages and not self._looks_up and (at := until()) > time.monotonic():
            self.ring_by(at)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._resting = False
        looks_up, self._looks_up = self._looks_up, False
        if looks_up or not self._messages:
            return None
        message = self._messages.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def ring_by(self, at: float) -> None:
        """`next` looks at its limit no later than then."""
        if at < self._rings_at:
            self.close()
            self._rings_at = at
            self._alarm = asyncio.get_running_loop().call_later(at - time.monotonic(), self._ring)

    def close(self) -> None:
        """Nobody reads on."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._rings_at = None, math.inf

    def look_up(self) -> None:
        """Something was dealt with in its reader's stead: that comes first, before what lies here."""
        self._looks_up = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _put(self, message: Message | Exception) -> None:
        self._messages.append(message)
        self._wake()

    def _ring(self) -> None:
        self._alarm, self._rings_at = None, math.inf
        self._wake()
