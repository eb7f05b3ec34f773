"""Policies that choose the draft length: how many candidates the next block may have, 0 for none.

A policy belongs to one sequence. It is told of each verified round and of plain tokens, and asked for the next length.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

LENGTHEN_ABOVE = 0.85
SHORTEN_BELOW = 0.60
_MAX_PROBE_BACKOFF = 16


class DraftLengthPolicy(Protocol):
    def draft_length(self) -> int:
        """Candidates on the longest path of the next block; 0: decode plainly."""
        ...

    def observe_round(self, drafted: int, accepted: int) -> None:
        """A block whose longest path had `drafted` > 0 candidates was verified; `accepted` of them were."""
        ...

    def observe_plain(self, tokens: int) -> None:
        """Tokens were decoded plainly."""
        ...


class FixedPolicy:
    """Always the same length."""

    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def draft_length(self) -> int:
        return self._draft_length

    def observe_round(self, drafted: int, accepted: int) -> None:
        pass

    def observe_plain(self, tokens: int) -> None:
        pass


class ThresholdPolicy:
    """The textbook rule over a window of recent rounds: above an acceptance of 0.85 lengthen by one, below 0.60 shorten
    by one, off below a floor.

    From off it returns by probing: after some plain tokens, one short round; each probe that fails doubles the wait.
    """

    def __init__(
        self, draft_length: int, max_draft_length: int, window: int, off_below: float, probe_after_tokens: int
    ) -> None:
        self._length = min(draft_length, max_draft_length)
        self._max_length = max_draft_length
        self._rounds: deque[tuple[int, int]] = deque(maxlen=window)
        self._off_below = off_below
        self._probe_after = probe_after_tokens
        self._backoff = 1
        self._plain_tokens_left = 0
        self._off = False

    @property
    def off(self) -> bool:
        return self._off

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted over the window; None before the first round."""
        drafted = sum(d for d, _ in self._rounds)
        return sum(a for _, a in self._rounds) / drafted if drafted else None

    def draft_length(self) -> int:
        if not self._off:
            return self._length
        return 0 if self._plain_tokens_left > 0 else min(2, self._max_length)

    def observe_plain(self, tokens: int) -> None:
        self._plain_tokens_left = max(self._plain_tokens_left - tokens, 0)

    def observe_round(self, drafted: int, accepted: int) -> None:
        if self._off:
            self._judge_probe(accepted / drafted)
            return
        self._rounds.append((drafted, accepted))
        rate = self.acceptance_rate or 0.0
        if rate < self._off_below and len(self._rounds) == self._rounds.maxlen:
            self._switch_off()
        elif rate > LENGTHEN_ABOVE:
            self._length = min(self._length + 1, self._max_length)
        elif rate < SHORTEN_BELOW:
            self._length = max(self._length - 1, 1)

    def _judge_probe(self, rate: float) -> None:
        if rate < SHORTEN_BELOW / 2:
            self._backoff = min(self._backoff * 2, _MAX_PROBE_BACKOFF)
            self._plain_tokens_left = self._probe_after * self._backoff
            return
        self._off = False
        self._backoff = 1
        self._length = min(2, self._max_length)

    def _switch_off(self) -> None:
        self._off = True
        self._rounds.clear()
        self._plain_tokens_left = self._probe_after * self._backoff
