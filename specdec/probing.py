"""When a sequence that decodes plainly tries its drafter again."""

from __future__ import annotations

SHORTEST = 4
LONGEST = 24
_LONGEST_EVER = 256
_COST_SHARE = 0.5
"""A probe that takes the drafter longer than so many plain steps is made more rarely, in proportion."""


class Probing:
    """Single probes with exponential back-off, counted in plain tokens."""

    def __init__(self, interval: int = 0) -> None:
        self.interval = max(interval, SHORTEST)
        self._left = self.interval
        self._unanswered: int | None = None

    @property
    def due(self) -> bool:
        return self._unanswered is None and self._left <= 0

    @property
    def waiting(self) -> bool:
        """For what becomes of a probe."""
        return self._unanswered is not None

    def started(self) -> None:
        self._unanswered = 0

    def passed(self, tokens: int) -> None:
        """Plain tokens were decoded. A probe that stays unanswered for long has failed."""
        if self._unanswered is None:
            self._left -= tokens
            return
        self._unanswered += tokens
        if self._unanswered > 4 * LONGEST:
            self.failed()

    def promising(self) -> None:
        """The probe said that it may pay again: the next one is made at once."""
        self._unanswered = None
        self.interval = SHORTEST
        self._left = 0

    def failed(self, cost: float = 0.0) -> None:
        """Nothing to gain: the wait doubles. cost: of the probe, in plain steps."""
        longest = min(LONGEST * max(cost / _COST_SHARE, 1.0), _LONGEST_EVER)
        self._unanswered = None
        self.interval = int(min(self.interval * 2, longest))
        self._left = self.interval
