"""The blocks of one sequence that were forwarded to the target and are not decided yet.

An *ahead* block was drafted before the block that it extends was verified. It is a hit if the log grew along it. So is
one of the drafter's *fan-out*, which it drafted in case that the target leaves the likeliest path.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specdec.candidates import CandidateTree
from specdec.log import Log, Place
from specdec.observations import BlockOutcome, Trial, outcome
from specdec.value import value


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
    path: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.path = tuple(self.candidates.likeliest_path)


@value
class _Fate:
    """followed: the log behind the block's base is a path of it. left: some of it lies below the log. left_path: the
    log went on, but not along its likeliest path, which all later blocks continue. decided: what became of it, told
    once."""

    followed: bool
    left: bool
    left_path: bool
    decided: tuple[BlockOutcome, ...] = ()


_ELSEWHERE = _Fate(False, False, False)


@value
class Outcome:
    """Ahead blocks whose base the log has reached since the last look, those of the fan-out apart. decided: what became
    of the blocks, ahead or not, on whose whole path the log has decided."""

    hits: int = 0
    misses: int = 0
    fan_out_hits: int = 0
    fan_out_misses: int = 0
    decided: tuple[BlockOutcome, ...] = field(default=(), compare=False)

    @property
    def num_ahead(self) -> int:
        return self.hits + self.misses + self.fan_out_hits + self.fan_out_misses


NOTHING = Outcome()


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
        if not self._blocks:
            return NOTHING
        length = len(self._log)
        reached = [block for block in self._blocks if block.base_length <= length]
        beyond = [block for block in self._blocks if block.base_length > length]
        decided: list[BlockOutcome] = []
        hit: list[_Block] = []
        missed: list[_Block] = []
        kept: list[_Block] = []
        for block in reached:
            fate = self._fate(block)
            decided += fate.decided
            if block.waits:
                (hit if fate.followed else missed).append(block)
                block.waits = False
            if fate.left:
                kept.append(block)
            if fate.left_path:  # what was drafted ahead of here cannot hit
                missed += beyond
                beyond = []
        self._blocks = kept + beyond
        if not hit and not missed:
            return Outcome(decided=tuple(decided))
        fan_out_hits = sum(block.fan_out for block in hit)
        fan_out_misses = sum(block.fan_out for block in missed)
        return Outcome(
            len(hit) - fan_out_hits, len(missed) - fan_out_misses, fan_out_hits, fan_out_misses, tuple(decided)
        )

    def clear(self) -> None:
        self._blocks.clear()

    def _fate(self, block: _Block) -> _Fate:
        """Of a block whose base the log has reached. One on another base says nothing about its candidates."""
        if self._log.place(block.base_length, block.prefix_digest) is not Place.HERE:
            return _ELSEWHERE
        token_ids = tuple(self._log.since(block.base_length))
        found = None if block.decided else outcome(block.candidates, token_ids)
        block.decided = block.decided or found is not None
        common = min(len(block.path), len(token_ids))
        left_path = block.path[:common] != token_ids[:common]
        if block.candidates.is_chain:  # most are: the path is all of it
            followed = not left_path and len(token_ids) == common
            left = followed and len(block.path) > common
        else:
            below = block.candidates.below(token_ids)
            followed, left = below is not None, bool(below)
        if found is not None and found.full and block.short:
            # A candidate that is missing gains as little as a wrong one.
            found = replace(found, trials=(*found.trials, Trial(None)))
        return _Fate(followed, left, left_path, () if found is None else (found,))
