"""What a policy is told of, as values: steps of the target, and what became of each block. Durations in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from specdec.candidates import ROOT, CandidateTree
from specdec.value import value


@value
class Round:
    """A step that verified candidates. drafted: candidates on the longest path. duration: since the sequence's commit
    before, None where that says nothing about rounds. step_time: of the forward that verified. ahead: of a block that
    lay ready (a hit)."""

    drafted: int
    accepted: int
    num_candidates: int = 0
    duration: float | None = None
    step_time: float = 0.0
    ahead: bool = False


@value
class PlainStep:
    """Tokens decoded without candidates. duration: of one step, None unless the target went on by itself. in_vain: of a
    step for which candidates were waited for, and none came; its forward took `step_time`."""

    tokens: int
    duration: float | None = None
    in_vain: float | None = None
    step_time: float = 0.0


@value
class Trial:
    """One depth that the log decided. rank: which sibling was the token, 0 the likeliest, None: none of them.
    confidence: of the drafter in the likeliest, None if it does not say."""

    rank: int | None
    siblings: int = 1
    confidence: float | None = None


@value
class BlockOutcome:
    """What the log said to a block whose base it reached, depth by depth, up to the first that failed. full: all were
    right."""

    trials: tuple[Trial, ...]
    full: bool = False

    @property
    def accepted(self) -> int:
        return sum(trial.rank is not None for trial in self.trials)


@value
class AheadBlock:
    """A block that was drafted on top of one of `length` that was right throughout. hit: so was its first candidate,
    the guess of the bonus; it may have come a little late."""

    hit: bool
    length: int


NOTHING_PROPOSED = BlockOutcome(())
"""The drafter was asked and had no candidate: that costs the asking, and says nothing about those that it has."""

Observation = Union[Round, PlainStep, BlockOutcome, AheadBlock]


def outcome(candidates: CandidateTree, token_ids: Sequence[int]) -> BlockOutcome | None:
    """What `token_ids`, the log behind the block's base, say to it; None while they end inside the tree."""
    if candidates.is_chain:  # most are
        return _chain_outcome(candidates, token_ids)
    trials: list[Trial] = []
    below = candidates.children_by_parent()
    node = ROOT
    for token_id in token_ids:
        children = below.get(node)
        if not children:
            break
        rank = next((i for i, child in enumerate(children) if candidates.token_ids[child] == token_id), None)
        confidence = candidates.confidences[children[0]] if candidates.confidences else None
        trials.append(Trial(rank, len(children), confidence))
        if rank is None:
            return BlockOutcome(tuple(trials))
        node = children[rank]
    return None if node in below else BlockOutcome(tuple(trials), full=True)


def _chain_outcome(candidates: CandidateTree, token_ids: Sequence[int]) -> BlockOutcome | None:
    proposed, sure = candidates.token_ids, candidates.confidences or (None,) * len(candidates)
    right = 0
    for token_id, candidate in zip(token_ids, proposed, strict=False):
        if token_id != candidate:
            return BlockOutcome((*[Trial(0, 1, each) for each in sure[:right]], Trial(None, 1, sure[right])))
        right += 1
    if right < len(proposed):
        return None
    return BlockOutcome(tuple([Trial(0, 1, each) for each in sure]), full=True)
