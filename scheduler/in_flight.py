"""The blocks of one sequence that were forwarded to the target and are not decided yet.

An *ahead* block was drafted before the block that it extends was verified. It is a hit if the log grew along it. So is
one of the drafter's *fan-out*, which it drafted in case that the target leaves the likeliest path.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specdec.candidates import ROOT, CandidateTree
from specdec.log import Log, Place
from specdec.observations import BlockOutcome, Trial, outcome


@dataclass(slots=True)
class _Block:
    """waits: its base was beyond the log when it was forwarded, and still is. short: it has less depth than asked.
    path: down the first children, where blocks are drafted ahead."""

    base_length: int
    prefix_digest: bytes
    candidates: CandidateTree
    waits: bool
    short: bool = False
    fan_out: bool = False
    decided: bool = False
    path: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.path = []
        node = ROOT
        for i, parent in enumerate(self.candidates.parents):
            if parent == node:
                self.path.append(self.candidates.token_ids[i])
                node = i


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ahead blocks whose base the log has reached since the last look, those of the fan-out apart. decided: what became
    of the blocks, ahead or not, on whose whole path the log has decided."""

    hits: int = 0
    misses: int = 0
    fan_out_hits: int = 0
    fan_out_misses: int = 0
    decided: tuple[BlockOutcome, ...] = field(default=(), compare=False)


class InFlight:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._blocks: list[_Block] = []

    def forwarded(
        self,
        base_length: int,
        prefix_digest: bytes,
        candidates: CandidateTree,
        short: bool = False,
        fan_out: bool = False,
    ) -> None:
        waits = base_length > len(self._log)
        self._blocks.append(_Block(base_length, prefix_digest, candidates, waits, short, fan_out))

    @property
    def covers(self) -> bool:
        """The target has, or will have, something to verify on top of the log."""
        return bool(self._blocks)

    def log_grew(self) -> Outcome:
        """Drops blocks that are used up, or that the log grew past on another way."""
        reached = [block for block in self._blocks if block.base_length <= len(self._log)]
        beyond = [block for block in self._blocks if block.base_length > len(self._log)]
        decided: list[BlockOutcome] = []
        hit: list[_Block] = []
        missed: list[_Block] = []
        kept: list[_Block] = []
        for block in reached:
            left = self._left(block)
            decided += self._decided(block)
            if block.waits:
                (missed if left is None else hit).append(block)
                block.waits = False
            if left is not None and len(left):
                kept.append(block)
            if self._left_path(block):  # what was drafted ahead of here cannot hit
                missed += beyond
                beyond = []
        self._blocks = kept + beyond
        fan_out_hits = sum(block.fan_out for block in hit)
        fan_out_misses = sum(block.fan_out for block in missed)
        return Outcome(
            len(hit) - fan_out_hits, len(missed) - fan_out_misses, fan_out_hits, fan_out_misses, tuple(decided)
        )

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

    def _left_path(self, block: _Block) -> bool:
        """The log went on from its base, but not along its likeliest path, which all later blocks continue."""
        if self._log.place(block.base_length, block.prefix_digest) is not Place.HERE:
            return False
        return any(a != b for a, b in zip(block.path, self._log.since(block.base_length), strict=False))
