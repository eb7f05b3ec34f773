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

    def answered(self, sequence: TargetSequence | None, arrived: float) -> None:
        """Something came for `sequence` that it can go on with."""
        if sequence is not None and sequence.waits:
            self._answer.observe(arrived - sequence.waiting_since)

    def forwarded(self, rows: int, seconds: float) -> None:
        self._forward.observe(rows, seconds)

    def hold(self, batch: Sequence[Work], sequences: Iterable[TargetSequence], now: float) -> float:
        """How long to wait before `batch` is forwarded; 0: not at all. Never longer than a block that is expected
        usually takes twice, counted from the commit before, nor than what is won by having it in the forward."""
        if not batch or self._answer.count < _KNOWN_AFTER:
            return 0.0
        latest = _SURELY * self._answer.mean
        ends = [s.waiting_since + min(latest, s.grant.patience) for s in sequences if s.waits]
        expected = [end for end in ends if now < end]
        if not expected:
            return 0.0
        wait = max(expected) - now
        return wait if wait < self._won(batch, len(expected)) else 0.0

    def _won(self, batch: Sequence[Work], waiting: int) -> float:
        """The wait at which a forward of all gives as many tokens per second as one of those that are ready, and then
        one of those that waited and of those that go on by themselves. Every sequence counts the same."""
        seconds = self._forward.knots()
        ready = sum(len(work.segment.token_ids) for work in batch)
        going_on = [len(work.segment.token_ids) for work in batch if not work.sequence.grant.patience]
        count = len(batch) + waiting
        apart = seconds(ready) + seconds(sum(going_on) + waiting)
        return count / (count + len(going_on)) * apart - seconds(ready + waiting)
