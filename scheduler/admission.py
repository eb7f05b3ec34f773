"""How long one sequence looks for a target: from when it has none until the first token that one commits."""

from __future__ import annotations

import math
import time

from scheduler.config import SchedulerConfig
from scheduler.errors import DeadlineExceeded, Overloaded, Unavailable
from scheduler.pool import Pool
from scheduler.request import GenerationRequest
from scheduler.worker import Worker


class Admission:
    """Times are monotonic seconds. waits_for_room: the target it was given last had none."""

    def __init__(self, config: SchedulerConfig, pool: Pool, request: GenerationRequest, deadline: float) -> None:
        self._config = config
        self._pool = pool
        self._request = request
        self._deadline = deadline
        self._since: float | None = None
        self.waits_for_room = False

    async def target(self, avoid: Worker | None) -> Worker:
        """A live target, another one than `avoid` if there is one. Raises DeadlineExceeded, and Unavailable when it was
        waited for as long as admission allows."""
        since = self._since = self._since or time.monotonic()
        until = min(since + self._config.admission_timeout, self._deadline)
        target = await self._pool.wait_for_target(self._request.model, avoid, until)
        if target is not None:
            return target
        self.check_deadline(time.monotonic())
        raise Unavailable(f"no live target worker within {self._config.admission_timeout:g} s")

    def check_deadline(self, now: float) -> None:
        """Raises DeadlineExceeded."""
        if now >= self._deadline:
            raise DeadlineExceeded(f"the request's deadline of {self._request.timeout:g} s passed")

    def no_room(self, why: str) -> None:
        """Its target has none. Raises Overloaded when it was waited for as long as admission allows."""
        self.waits_for_room = True
        if time.monotonic() - (self._since or math.inf) >= self._config.admission_timeout:
            raise Overloaded(f"no target worker has room: {why}")

    def over(self) -> None:
        """A target has committed tokens."""
        self._since, self.waits_for_room = None, False
