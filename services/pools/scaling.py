"""How many workers a role should have: more where sequences queue and more workers pay, fewer where some are idle."""

from __future__ import annotations

from dataclasses import dataclass

UP_SECONDS = 10.0
"""How long a queue must last: a burst is over before a model is loaded."""
DOWN_SECONDS = 60.0
"""How long a worker must be too many."""
PAYS = 1.05
"""Goodput must have grown by this factor once another worker serves, or it is taken back."""
WEIGH_SECONDS = 20.0
"""How long another worker serves before that is looked at."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """sequences: that one worker serves well at once."""

    fewest: int
    most: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Demand:
    """workers: that serve. sequences: at them, or waiting for them. goodput: committed tokens per second."""

    workers: int
    sequences: int
    goodput: float


@dataclass(slots=True)
class _Trial:
    """Of the last worker that came. before: goodput without it. began: when it was seen to serve."""

    before: float
    began: float | None = None


class RoleScaler:
    """Of one role. Asked every second or so; moves by one worker at a time."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._wanted = bounds.fewest
        self._busy_since: float | None = None
        self._idle_since: float | None = None
        self._trial: _Trial | None = None
        self._worthless = False

    def wanted(self, demand: Demand, now: float) -> int:
        """Workers that there should be; now: seconds by a clock that only grows."""
        if demand.workers < self._wanted:  # one is on its way, or starts again
            return self._wanted
        self._weigh(demand, now)
        busy = demand.sequences > demand.workers * self._bounds.sequences
        idle = demand.sequences <= (demand.workers - 1) * self._bounds.sequences // 2
        if not busy:
            self._worthless = False
        self._busy_since = _since(self._busy_since, busy, now)
        self._idle_since = _since(self._idle_since, idle, now)
        if self._lasts(self._busy_since, UP_SECONDS, now) and not self._worthless and self._trial is None:
            self._go_to(min(self._wanted + 1, self._bounds.most), demand)
        elif self._lasts(self._idle_since, DOWN_SECONDS, now):
            self._go_to(max(self._wanted - 1, self._bounds.fewest), demand)
        return self._wanted

    def _go_to(self, workers: int, demand: Demand) -> None:
        if workers > self._wanted:
            self._trial = _Trial(demand.goodput)
        self._wanted = workers
        self._busy_since = self._idle_since = None

    def _weigh(self, demand: Demand, now: float) -> None:
        """Takes back the last worker if it has served for a while and nothing got faster."""
        if self._trial is None:
            return
        if self._trial.began is None:
            self._trial.began = now
        elif now - self._trial.began >= WEIGH_SECONDS:
            needed = demand.sequences > (demand.workers - 1) * self._bounds.sequences
            self._worthless = needed and demand.goodput < PAYS * self._trial.before
            self._trial = None
            if self._worthless:
                self._wanted = max(self._wanted - 1, self._bounds.fewest)

    @staticmethod
    def _lasts(since: float | None, seconds: float, now: float) -> bool:
        return since is not None and now - since >= seconds


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return (now if since is None else since) if holds else None
