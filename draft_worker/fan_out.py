"""Outcome fan-out: drafting also for the likeliest ways in which the target may leave the tail (arXiv 2603.03251).

A *branch* is a block whose base is part of the tail and then another token than the tail has there, the *correction*:
if the target decides just that, the block lies ready. Corrections are the drafter's own next choices, its *runner-ups*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.candidates import EMPTY, ROOT, CandidateTree
from specdec.log import Log
from specdec.params import StopConditions

RUNNER_UPS = 2
"""So many are asked of the drafter at each depth."""
_USUAL_CONFIDENCE = 0.8
"""Of a drafter that does not say how sure it is."""
_WORTHWHILE = 0.01
"""Likelihood below which an outcome is not drafted for."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """What the drafter thinks of one token of the tail. runner_ups: what else it may be, likeliest first."""

    runner_ups: tuple[int, ...] = ()
    confidence: float = 1.0


@dataclass(slots=True)
class Branch:
    """log: the base of its block; it ends with the correction, behind `fork` tokens that the tail has too. tree: the
    block; None while it is drafted. Its object and its log are used again for later outcomes, so that the drafter can
    keep what it computed for them."""

    job_id: str
    log: Log
    fork: int = 0
    tree: CandidateTree | None = None

    @property
    def correction(self) -> int:
        return self.log.token_ids[-1]

    def turn_to(self, log: Log, fork: int, correction: int) -> None:
        """Continues the first `fork` tokens of `log` by `correction`."""
        common = min(fork, len(self.log))
        while self.log.digest_at(common) != log.digest_at(common):
            common -= 1
        self.log.roll_back(common)
        self.log.append([*log.token_ids[common:fork], correction])
        self.fork, self.tree = fork, None

    def is_open(self, log: Log, committed_length: int) -> bool:
        """The target may still decide its correction behind what `log` has at its fork."""
        return committed_length <= self.fork < len(log) and log.digest_at(self.fork) == self.log.digest_at(self.fork)


@dataclass(slots=True)
class FanOut:
    """The branches of one sequence. doubts: of each token of the tail, in order."""

    sequence_id: str
    root: bytes
    secret: bytes
    doubts: list[Doubt] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    _idle: list[Branch] = field(default_factory=list)

    @property
    def job_ids(self) -> list[str]:
        """Under which a drafter may hold something for branches."""
        return [branch.job_id for branch in (*self.branches, *self._idle)]

    def prune(self, log: Log, committed_length: int) -> None:
        """Gives up branches that cannot come true any more."""
        closed = [branch for branch in self.branches if not branch.is_open(log, committed_length)]
        if closed:
            self.branches = [branch for branch in self.branches if branch not in closed]
            self._idle += closed

    def grow(
        self, log: Log, committed_length: int, block_ends: Sequence[int], stop: StopConditions, each: int, room: int
    ) -> list[Branch]:
        """New branches for the likeliest outcomes that have none, up to `each` for every block of the tail, where they
        end in order, and up to `room` in all. One block's must not wait until those of the block before are decided."""
        grown: list[Branch] = []
        if len(self.branches) >= room:
            return grown
        taken = {(branch.fork, branch.correction) for branch in self.branches}
        of_block = Counter(bisect_right(block_ends, branch.fork) for branch in self.branches)
        for fork, correction in likeliest(self.doubts, committed_length):
            block = bisect_right(block_ends, fork)
            ends = correction in stop.stop_token_ids or fork + 1 >= stop.max_length
            if (fork, correction) in taken or ends or of_block[block] >= each or len(self.branches) >= room:
                continue
            of_block[block] += 1
            branch = self._idle.pop() if self._idle else self._new()
            branch.turn_to(log, fork, correction)
            self.branches.append(branch)
            grown.append(branch)
        return grown

    def taken(self, log: Log, fork: int, correction: int) -> Branch | None:
        """The drafted branch for this outcome."""
        digest = log.digest_at(fork)
        for branch in self.branches:
            if branch.fork == fork and branch.correction == correction and branch.log.digest_at(fork) == digest:
                return branch if branch.tree else None
        return None

    def _new(self) -> Branch:
        number = len(self.branches) + len(self._idle)
        return Branch(f"{self.sequence_id}/{number}", Log(self.root, (), self.secret))


def likeliest(doubts: Sequence[Doubt], first: int) -> list[tuple[int, int]]:
    """Outcomes (tokens before it, correction), likeliest first. first: tokens before the first doubt.

    An outcome needs all tokens above to be right and this one to be wrong. About half of what is not the drafter's
    choice is its runner-up, and half of the rest the next.
    """
    outcomes: list[tuple[float, int, int]] = []
    above = 1.0
    for fork, doubt in enumerate(doubts, first):
        if above < _WORTHWHILE:
            break
        likelihood = above * (1 - doubt.confidence)
        for correction in doubt.runner_ups:
            likelihood /= 2
            outcomes.append((likelihood, fork, correction))
        above *= doubt.confidence
    outcomes.sort(key=lambda outcome: -outcome[0])
    return [(fork, correction) for likelihood, fork, correction in outcomes if likelihood >= _WORTHWHILE]


def doubts_of(tree: CandidateTree) -> list[Doubt]:
    """Down the likeliest path."""
    doubts: list[Doubt] = []
    node = ROOT
    while children := tree.children(node):
        node = children[0]
        confidence = tree.confidences[node] if tree.confidences else _USUAL_CONFIDENCE
        choice = tree.token_ids[node]
        others = dict.fromkeys(tree.token_ids[child] for child in children[1:] if tree.token_ids[child] != choice)
        doubts.append(Doubt(tuple(others)[:RUNNER_UPS], confidence))
    return doubts


def narrowed(tree: CandidateTree, width: int) -> CandidateTree:
    """Only the first `width` siblings at each node, and what lies below them."""
    new_index = {ROOT: ROOT}
    siblings: dict[int, int] = {}
    for i, parent in enumerate(tree.parents):
        siblings[parent] = siblings.get(parent, 0) + 1
        if parent in new_index and siblings[parent] <= width:
            new_index[i] = len(new_index) - 1
    if len(new_index) == len(tree) + 1:
        return tree
    kept = list(new_index)[1:]
    if not kept:
        return EMPTY
    return CandidateTree(
        tuple(tree.token_ids[i] for i in kept),
        tuple(new_index[tree.parents[i]] for i in kept),
        tuple(tree.laws[i] for i in kept) if tree.laws else (),
        tuple(tree.confidences[i] for i in kept) if tree.confidences else (),
    )
