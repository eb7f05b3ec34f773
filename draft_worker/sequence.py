"""A sequence as the draft worker holds it: a replica of the log, and the standing order for it."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.drafter import DraftJob
from specdec.grammar import TokenMask
from specdec.log import Log
from specdec.messages import DraftPlan, Epoch
from specdec.params import AcceptRule, SamplingParams, StopConditions


@dataclass(slots=True)
class DraftSequence:
    """due_since: when the tokens came that the next block continues, monotonic seconds; None if no block is due."""

    sequence_id: str
    session: int
    epoch: Epoch
    log: Log
    sampling: SamplingParams
    stop: StopConditions
    plan: DraftPlan
    mask: TokenMask | None = None
    due_since: float | None = None

    def order(self, plan: DraftPlan, now: float) -> None:
        self.plan = plan
        self.due_since = now if plan.draft_length else None

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
        )
