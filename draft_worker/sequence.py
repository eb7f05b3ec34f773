"""A sequence as the draft worker holds it: a replica of the log with a tail of its own, and the standing order for it.

The tail is what it drafted and nobody has confirmed yet. It drafts on from its tail while the target verifies, so that
a block can lie ready before the block it extends was verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.fan_out import RUNNER_UPS, Branch, Doubt, FanOut, doubts_of, narrowed
from specdec.candidates import CandidateTree
from specdec.drafter import DraftJob
from specdec.grammar import TokenMask
from specdec.log import Log
from specdec.messages import DraftPlan, Epoch
from specdec.params import AcceptRule, SamplingParams, StopConditions

_NO_DOUBT = Doubt()


@dataclass(slots=True)
class DraftSequence:
    """log: the committed tokens, `committed_length` of them, and the tail. in_flight: where the blocks end that were
    sent and are not decided. due_since: since when the next block is due, monotonic seconds; None if none is.
    fan_out: what is drafted beside the tail; it never extends it before the target has gone that way."""

    sequence_id: str
    session: int
    epoch: Epoch
    log: Log
    sampling: SamplingParams
    stop: StopConditions
    plan: DraftPlan
    fan_out: FanOut
    mask: TokenMask | None = None
    committed_length: int = 0
    in_flight: list[int] = field(default_factory=list)
    due_since: float | None = None

    def order(self, plan: DraftPlan, now: float) -> None:
        """The plan stands until the next; blocks are due while the window has room."""
        self.plan = plan
        self._look_ahead(now)

    def advance(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Tokens were committed behind `base_length`: of the tail stays what they agree with. Where they leave it along
        a branch, its block becomes the tail."""
        tail = self.log.since(base_length)
        same = next((i for i, (a, b) in enumerate(zip(tail, token_ids, strict=False)) if a != b), None)
        if same is not None:
            fork = base_length + same
            branch = self.fan_out.taken(self.log, fork, token_ids[same])
            self.log.roll_back(fork)
            if branch is not None and branch.tree:
                self._turn_into(branch, branch.tree)
                self.advance(base_length, token_ids)
                return
        missing = base_length + len(token_ids) - len(self.log)
        if missing > 0:
            self.log.append(token_ids[-missing:])
        self._committed(base_length + len(token_ids))

    def sent(self, tree: CandidateTree, now: float) -> None:
        """A block was sent; the tail grows by its likeliest path, and the next one may be due at once."""
        if not len(tree):
            self.due_since = None  # nothing to propose here, nor a step further
            return
        self._grow(tree)
        self.in_flight.append(len(self.log))
        self._look_ahead(now)

    def new_branches(self, most: int, max_in_flight: int) -> list[Branch]:
        """Those that are worth a draft now: at most so many, and with them so many blocks in flight."""
        if not self._fans_out or not self.in_flight:
            return []
        room = min(max_in_flight - self.plan.window, len(self.fan_out.branches) + most)
        each = self.plan.fan_out
        return self.fan_out.grow(self.log, self.committed_length, self.in_flight, self.stop, each, room)

    def may_take(self, branch: Branch) -> bool:
        """The target may still go the branch's way."""
        return branch.is_open(self.log, self.committed_length)

    @property
    def width(self) -> int:
        """Siblings of a candidate that are sent."""
        return 1 if self.sampling.accept_rule is AcceptRule.BLOCK else self.plan.width

    def as_ordered(self, tree: CandidateTree) -> CandidateTree:
        """What of a block is sent: without the siblings that were only asked for to have corrections."""
        return narrowed(tree, self.width) if self._fans_out else tree

    def job(self, branch: Branch | None = None) -> DraftJob:
        """For the next block of the tail, or of a branch."""
        return DraftJob(
            branch.job_id if branch else self.sequence_id,
            branch.log if branch else self.log,
            self.sampling,
            self.stop,
            self.plan.draft_length,
            max(self.width, 1 + RUNNER_UPS) if self._fans_out else self.width,
            self.mask,
            self.plan.min_confidence,
        )

    @property
    def _fans_out(self) -> bool:
        """Under the rules that test ratios the target draws its corrections apart from the drafter: not worth it."""
        return self.plan.fan_out > 0 and self.sampling.accept_rule is AcceptRule.INVARIANT

    def _turn_into(self, branch: Branch, tree: CandidateTree) -> None:
        """The log ends at the fork, and the target went on along the branch."""
        kept = self.fan_out.doubts[: branch.fork - self.committed_length]
        self.fan_out.doubts = [*kept, _NO_DOUBT]
        self.log.append([branch.correction])
        self._grow(tree)
        self.in_flight.append(len(self.log))

    def _grow(self, tree: CandidateTree) -> None:
        path = tree.likeliest_path
        self.log.append(path)
        self.fan_out.doubts += doubts_of(tree) if self._fans_out else [_NO_DOUBT] * len(path)

    def _committed(self, length: int) -> None:
        doubts = self.fan_out.doubts[max(length - self.committed_length, 0) :]
        self.fan_out.doubts = doubts[: len(self.log) - length]
        self.committed_length = length
        self.in_flight = [end for end in self.in_flight if length < end <= len(self.log)]
        self.fan_out.prune(self.log, length)

    def _look_ahead(self, now: float) -> None:
        has_ended = len(self.log) > self.committed_length and self.log.token_ids[-1] in self.stop.stop_token_ids
        wanted = (
            self.plan.draft_length > 0
            and len(self.in_flight) < self.plan.window
            and len(self.log) < self.stop.max_length
            and not has_ended
        )
        self.due_since = now if wanted else None
