"""A sequence as the draft worker holds it: a replica of the log with a tail of its own, and the standing order for it.

The tail is what it drafted and nobody has confirmed yet. It drafts on from its tail while the target verifies, so that
a block can lie ready before the block it extends was verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.candidates import ROOT, CandidateTree
from specdec.drafter import DraftJob
from specdec.grammar import TokenMask
from specdec.log import Log
from specdec.messages import DraftPlan, Epoch
from specdec.params import AcceptRule, SamplingParams, StopConditions


@dataclass(slots=True)
class DraftSequence:
    """log: the committed tokens, `committed_length` of them, and the tail. in_flight: where the blocks end that were
    sent and are not decided. due_since: since when the next block is due, monotonic seconds; None if none is."""

    sequence_id: str
    session: int
    epoch: Epoch
    log: Log
    sampling: SamplingParams
    stop: StopConditions
    plan: DraftPlan
    mask: TokenMask | None = None
    committed_length: int = 0
    in_flight: list[int] = field(default_factory=list)
    due_since: float | None = None

    def order(self, plan: DraftPlan, now: float) -> None:
        """The plan stands until the next; blocks are due while the window has room."""
        self.plan = plan
        self._look_ahead(now)

    def advance(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Tokens were committed behind `base_length`: of the tail stays what they agree with."""
        tail = self.log.since(base_length)
        same = next((i for i, (a, b) in enumerate(zip(tail, token_ids, strict=False)) if a != b), None)
        if same is not None:
            self.log.roll_back(base_length + same)
        missing = base_length + len(token_ids) - len(self.log)
        if missing > 0:
            self.log.append(token_ids[-missing:])
        self.committed_length = base_length + len(token_ids)
        self.in_flight = [end for end in self.in_flight if self.committed_length < end <= len(self.log)]

    def sent(self, tree: CandidateTree, now: float) -> None:
        """A block was sent; the tail grows by its likeliest path, and the next one may be due at once."""
        if not len(tree):
            self.due_since = None  # nothing to propose here, nor a step further
            return
        self.log.append(likeliest_path(tree))
        self.in_flight.append(len(self.log))
        self._look_ahead(now)

    @property
    def job(self) -> DraftJob:
        return DraftJob(
            self.sequence_id,
            self.log,
            self.sampling,
            self.stop,
            self.plan.draft_length,
            1 if self.sampling.accept_rule is AcceptRule.BLOCK else self.plan.width,
            self.mask,
            self.plan.min_confidence,
        )

    def _look_ahead(self, now: float) -> None:
        has_ended = len(self.log) > self.committed_length and self.log.token_ids[-1] in self.stop.stop_token_ids
        wanted = (
            self.plan.draft_length > 0
            and len(self.in_flight) < self.plan.window
            and len(self.log) < self.stop.max_length
            and not has_ended
        )
        self.due_since = now if wanted else None


def likeliest_path(tree: CandidateTree) -> list[int]:
    """Tokens along the first children: drafters put the likeliest sibling first."""
    path: list[int] = []
    node = ROOT
    while children := tree.children(node):
        node = children[0]
        path.append(tree.token_ids[node])
    return path
