"""What comes to one sequence, in order: results of its workers, the loss of one, or the error that ends it."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Union

from scheduler.errors import RequestError
from scheduler.worker import AnyResult, Worker

Message = Union[tuple[Worker, AnyResult], tuple[Worker, None]]
"""A worker's result; None: its stream broke."""


class Inbox:
    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | RequestError] = asyncio.Queue()

    def deliver(self, worker: Worker, result: AnyResult) -> None:
        self._messages.put_nowait((worker, result))

    def lost(self, worker: Worker) -> None:
        """That worker's stream broke."""
        self._messages.put_nowait((worker, None))

    def end(self, error: RequestError) -> None:
        """The sequence is given up."""
        self._messages.put_nowait(error)

    async def next(self, until: float) -> Message | None:
        """What came first; None if nothing did until then (monotonic seconds). Raises the error that ends the
        sequence."""
        if self._messages.empty():
            try:
                async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
                    message = await self._messages.get()
            except TimeoutError:
                return None
        else:
            message = self._messages.get_nowait()
        if isinstance(message, RequestError):
            raise message
        return message
