"""When a sequence that decodes plainly tries its drafter again."""

from __future__ import annotations

from collections.abc import Callable

SHORTEST = 8
LONGEST = 16
_PATIENT_FOR = 16
"""So many probes are made LONGEST apart, so that a text which drafts well again is soon noticed; if all fail, it is not
the text, and the wait grows on."""
_LONGEST_EVER = 512
_LENGTH = 4
_COST_SHARE = 0.5


def probe_length(draft: Callable[[int], float], plain: float) -> int:
    """Candidates of a probe: at most four, and fewer if drafting them takes more than half a plain step."""
    return next((n for n in range(_LENGTH, 1, -1) if draft(n) <= _COST_SHARE * plain), 1)


class Probing:
    """Single probes with exponential back-off, counted in plain tokens. failures: in a row, those of earlier sequences
    of the same drafter included."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self._left = self._interval
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
        self.failures = 0
        self._left = 0

    def failed(self) -> None:
        """Nothing to gain."""
        self._unanswered = None
        self.failures += 1
        self._left = self._interval

    @property
    def _interval(self) -> int:
        if self.failures <= _PATIENT_FOR:
            return min(SHORTEST << min(self.failures, 8), LONGEST)
        return min(LONGEST << min((self.failures - _PATIENT_FOR + 1) // 2, 8), _LONGEST_EVER)
