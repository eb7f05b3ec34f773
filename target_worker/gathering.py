"""Keeps sequences in step: the next forward is held back for blocks that are about to come.

Whoever misses a forward waits for the whole of it, and groups of sequences that run one after the other pay what a
forward costs whatever its rows once per group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.estimates import Curve, RunningMean
from target_worker.batch import Work
from target_worker.sequence import TargetSequence

_KNOWN_AFTER = 3
_SURELY = 2.0
"""A block that has not come after so many times the usual time is waited for no longer."""


class Gathering:
    """Times are seconds; those that are handed in, monotonic."""

    def __init__(self) -> None:
        self._forward = Curve(growth=0.5, offset=32.0)
        self._answer = RunningMean()
        """From the commit of a sequence that waits until its next block."""
        self._tokens = RunningMean(mean=1.0)
        """That such a sequence commits at once."""

    def answered(self, sequence: TargetSequence | None, arrived: float) -> None:
        """Something came for `sequence` that it can go on with."""
        if sequence is not None and sequence.waits:
            self._answer.observe(arrived - sequence.waiting_since)

    def forwarded(self, rows: int, seconds: float) -> None:
        self._forward.observe(rows, seconds)

    def committed(self, sequence: TargetSequence, tokens: int) -> None:
        if sequence.grant.patience:
            self._tokens.observe(tokens)

    def hold(self, batch: Sequence[Work], sequences: Iterable[TargetSequence], now: float) -> float:
        """How long to wait before `batch` is forwarded; 0: not at all. Never longer than twice the time that a block
        usually takes, counted from the commit before, nor than what is won by having it in the forward."""
        if not batch or self._answer.count < _KNOWN_AFTER:
            return 0.0
        usual = self._answer.mean
        since = [s.waiting_since for s in sequences if s.waits and now < s.waiting_since + self._latest(s)]
        if not since:
            return 0.0
        won = self._won(batch, len(since))
        expected, latest = max(since) + usual - now, max(since) + _SURELY * usual - now
        return min(latest, won) if expected < won else 0.0

    def _latest(self, sequence: TargetSequence) -> float:
        return min(_SURELY * self._answer.mean, sequence.grant.patience)

    def _won(self, batch: Sequence[Work], waiting: int) -> float:
        """The wait at which a forward of all gives as many tokens per second as one of those that are ready, and then
        one of those that waited and of those that go on by themselves."""
        seconds = self._forward.knots()
        rows = sum(len(work.segment.token_ids) for work in batch)
        going_on = [len(work.segment.token_ids) for work in batch if not work.sequence.grant.patience]
        once = len(going_on) + (len(batch) - len(going_on) + waiting) * max(self._tokens.mean, 1.0)
        apart = seconds(rows) + seconds(sum(going_on) + waiting)
        return once / (once + len(going_on)) * apart - seconds(rows + waiting)
