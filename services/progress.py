"""Health that means progress: a worker that holds work it should answer and does not step is not healthy."""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.messages import Load


class Progress:
    """Watches one worker from the event loop. A worker without work never stalls, however long it rests.

    stall_after: seconds without a step or an answer, while one is owed.
    """

    def __init__(
        self, load: Callable[[], Load], stall_after: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._stall_after = stall_after
        self._clock = clock
        self._steps = load().steps
        self._owed_since: float | None = None

    def owe(self) -> None:
        """The worker was handed something that it must answer."""
        if self._owed_since is None:
            self._owed_since = self._clock()

    def answered(self) -> None:
        self._owed_since = None

    @property
    def stalled(self) -> bool:
        return self.waited > self._stall_after

    @property
    def waited(self) -> float:
        """Seconds without a step or an answer while one is owed."""
        if self._owed_since is None:
            return 0.0
        steps = self._load().steps
        if steps != self._steps:
            self._steps = steps
            self._owed_since = self._clock()
        return self._clock() - self._owed_since
