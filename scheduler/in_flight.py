"""The blocks of one sequence that were forwarded to the target and are not decided yet.

An *ahead* block was drafted before the block that it extends was verified. It is a hit if the log grew along it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.candidates import CandidateTree
from specdec.log import Log, Place


@dataclass(slots=True)
class _Block:
    """waits: its base was beyond the log when it was forwarded, and still is."""

    base_length: int
    prefix_digest: bytes
    candidates: CandidateTree
    waits: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ahead blocks whose base the log has reached since the last look."""

    hits: int = 0
    misses: int = 0


class InFlight:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._blocks: list[_Block] = []

    def forwarded(self, base_length: int, prefix_digest: bytes, candidates: CandidateTree) -> None:
        ahead = base_length > len(self._log)
        self._blocks.append(_Block(base_length, prefix_digest, candidates, ahead))

    @property
    def covers(self) -> bool:
        """The target has, or will have, something to verify on top of the log."""
        return bool(self._blocks)

    def log_grew(self) -> Outcome:
        """Drops blocks that are used up, or that the log grew past on another way."""
        hits = misses = 0
        kept: list[_Block] = []
        for block in self._blocks:
            if block.base_length > len(self._log):
                kept.append(block)
                continue
            left = self._left(block)
            if block.waits:
                hits += left is not None
                misses += left is None
                block.waits = False
            if left is not None and len(left):
                kept.append(block)
        # What was drafted on top of a block that missed cannot hit.
        self._blocks = [] if misses else kept
        return Outcome(hits, misses + sum(block.waits for block in kept) if misses else misses)

    def clear(self) -> None:
        self._blocks.clear()

    def _left(self, block: _Block) -> CandidateTree | None:
        """What of the block lies below the log; None if the log went another way."""
        if self._log.place(block.base_length, block.prefix_digest) is not Place.HERE:
            return None
        return block.candidates.below(self._log.since(block.base_length))
