"""The blocks of one sequence that were forwarded to the target and are not decided yet.

An *ahead* block was drafted before the block that it extends was verified. It is a hit if the log grew along it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specdec.candidates import CandidateTree
from specdec.log import Log, Place
from specdec.observations import BlockOutcome, Trial, outcome


@dataclass(slots=True)
class _Block:
    """waits: its base was beyond the log when it was forwarded, and still is. short: it has less depth than asked."""

    base_length: int
    prefix_digest: bytes
    candidates: CandidateTree
    waits: bool
    short: bool = False
    decided: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ahead blocks whose base the log has reached since the last look. decided: what became of the blocks, ahead or
    not, on whose whole path the log has decided."""

    hits: int = 0
    misses: int = 0
    decided: tuple[BlockOutcome, ...] = field(default=(), compare=False)


class InFlight:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._blocks: list[_Block] = []

    def forwarded(self, base_length: int, prefix_digest: bytes, candidates: CandidateTree, short: bool = False) -> None:
        ahead = base_length > len(self._log)
        self._blocks.append(_Block(base_length, prefix_digest, candidates, ahead, short))

    @property
    def covers(self) -> bool:
        """The target has, or will have, something to verify on top of the log."""
        return bool(self._blocks)

    def log_grew(self) -> Outcome:
        """Drops blocks that are used up, or that the log grew past on another way."""
        hits = misses = 0
        kept: list[_Block] = []
        decided: list[BlockOutcome] = []
        for block in self._blocks:
            if block.base_length > len(self._log):
                kept.append(block)
                continue
            left = self._left(block)
            decided += self._decided(block)
            if block.waits:
                hits += left is not None
                misses += left is None
                block.waits = False
            if left is not None and len(left):
                kept.append(block)
        # What was drafted on top of a block that missed cannot hit.
        self._blocks = [] if misses else kept
        dropped = sum(block.waits for block in kept) if misses else 0
        return Outcome(hits, misses + dropped, tuple(decided))

    def clear(self) -> None:
        self._blocks.clear()

    def _decided(self, block: _Block) -> list[BlockOutcome]:
        """What became of it, told once. A block on another base says nothing about its candidates."""
        if block.decided or self._log.place(block.base_length, block.prefix_digest) is not Place.HERE:
            return []
        found = outcome(block.candidates, self._log.since(block.base_length))
        if found is None:
            return []
        block.decided = True
        if found.full and block.short:  # a candidate that is missing gains as little as a wrong one
            found = replace(found, trials=(*found.trials, Trial(None)))
        return [found]

    def _left(self, block: _Block) -> CandidateTree | None:
        """What of the block lies below the log; None if the log went another way."""
        if self._log.place(block.base_length, block.prefix_digest) is not Place.HERE:
            return None
        return block.candidates.below(self._log.since(block.base_length))
