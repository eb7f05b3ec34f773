"""When a sequence that decodes plainly tries its drafter again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

FIRST = 8
LATER = 16
"""Tokens before a probe, on the average: the first, and one behind one that failed."""
_LENGTH = 4
_COST_SHARE = 0.5
_SHARES = ((8, 0.04), (32, 0.02), (128, 0.01), (512, 0.005))
"""Of the time of a target, what probes of a drafter may take while fewer than so many have failed in a row: at first it
may be the text, which changes, and then it is the drafter."""
_LEAST_SHARE = 0.0025


def probe_length(draft: Callable[[int], float], plain: float) -> int:
    """Candidates of a probe: at most four, and fewer if drafting them takes more than half a plain step."""
    return next((n for n in range(_LENGTH, 1, -1) if draft(n) <= _COST_SHARE * plain), 1)


def probe_share(failures: int, sequences: int = 1) -> float:
    """Share of a target's time for the probes of a drafter of which so many failed in a row. sequences: that share the
    target; what one of them finds out says little of what pays for all, and often it is not acceptance that is wanting.
    """
    share = next((share for below, share in _SHARES if failures < below), _LEAST_SHARE)
    return share / math.sqrt(max(sequences / 4, 1))


class Probing:
    """Single probes, counted in plain tokens. failures: in a row, those of earlier sequences of the same drafter
    included."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self._random = random.Random(failures)
        self._left = self._about(self._interval)
        self._unanswered: int | None = None
        self.urgent = False
        """The latest one said that it may pay again: the next one is made at once."""

    @property
    def due(self) -> bool:
        return self._unanswered is None and self._left <= 0

    @property
    def waiting(self) -> bool:
        """For what becomes of a probe."""
        return self._unanswered is not None

    def started(self) -> None:
        self._unanswered = 0
        self.urgent = False

    def passed(self, tokens: int) -> None:
        """Plain tokens were decoded. A probe that stays unanswered for long has failed."""
        if self._unanswered is None:
            self._left -= tokens
            return
        self._unanswered += tokens
        if self._unanswered > 4 * LATER:
            self.failed()

    def promising(self) -> None:
        self._unanswered = None
        self.failures = 0
        self._left = 0
        self.urgent = True

    def failed(self) -> None:
        """Nothing to gain."""
        self._unanswered = None
        self.failures += 1
        self._left = self._about(self._interval)

    def _about(self, tokens: int) -> int:
        """Up to a quarter more or less: even steps through a text that repeats itself would always meet the same
        place."""
        return self._random.randint(tokens - tokens // 4, tokens + tokens // 4)

    @property
    def _interval(self) -> int:
        return LATER if self.failures else FIRST
