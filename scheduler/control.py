"""What decides how one sequence speculates, and all that it is told: the join of the driver and the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from scheduler.in_flight import InFlight, Outcome
from scheduler.tally import Tally
from scheduler.worker import Worker
from specdec.candidates import CandidateTree
from specdec.decision import Decision
from specdec.goodput import Explained
from specdec.log import Log
from specdec.messages import Committed, DraftPlan
from specdec.observations import NOTHING_PROPOSED, AheadBlock, PlainStep, Round
from specdec.policy import SpeculationPolicy

_PLANS_UNDER_WAY = 8
"""A block may have been drafted under any of so many latest plans."""


class Control:
    """Times are monotonic seconds. plan: what the drafter was told last; may_be_ahead: it may send ahead blocks.
    fan_out: of every plan that lets the drafter go ahead."""

    def __init__(self, policy: SpeculationPolicy, log: Log, tally: Tally, max_length: int, fan_out: int = 0) -> None:
        self._policy = policy
        self._log = log
        self._tally = tally
        self._max_length = max_length
        self._fan_out = fan_out
        self._in_flight = InFlight(log)
        self._committed_at: float | None = None
        self._was_plain = False
        self._lies_ready = False
        self._caught_up = False
        """The drafter had to read what it was not told before, so that this round took longer than others."""
        self._open_end: int | None = None
        """Length of a block that was right throughout, while the one drafted on top of it has not come."""
        self._asked_lengths: deque[int] = deque(maxlen=_PLANS_UNDER_WAY)
        self.plan = DraftPlan(0)
        self.may_be_ahead = False

    @property
    def covers(self) -> bool:
        """The target has, or will have, something to verify on top of the log."""
        return self._in_flight.covers

    def explained(self) -> Sequence[Explained]:
        return self._policy.explained()

    @property
    def reason(self) -> Explained | None:
        """Of the latest decision, if the policy gives reasons."""
        explained = self._policy.explained()
        return explained[-1] if explained else None

    def serve_with(self, target: Worker | None, drafter: Worker | None) -> None:
        """The sequence is on these workers now."""
        if target is not None:
            self._policy.attach(target.target_model, drafter.drafter_model if drafter else None)
        if drafter is not None:
            self._tally.drafter = drafter.drafter_label

    def restart(self) -> None:
        """The sequence is opened anew: nothing is in flight, and the next commit tells nothing about rounds."""
        self._in_flight.clear()
        self._committed_at = None
        self._lies_ready = self.may_be_ahead = False
        self._open_end = None
        self.plan = DraftPlan(0)

    def close(self) -> None:
        self._policy.close()

    def decide(self) -> Decision:
        decision = self._policy.decide()
        self._tally.decided(decision)
        return decision

    def asked(self, decision: Decision) -> DraftPlan:
        """The plan that the drafter is told now. A probe never drafts ahead."""
        window = 1 if decision.probe else decision.window
        fan_out = self._fan_out if window > 1 else 0
        self.plan = DraftPlan(decision.draft_length, decision.width, window, decision.min_confidence, fan_out)
        self.may_be_ahead = self.may_be_ahead or self.plan.window > 1
        self._asked_lengths.append(decision.draft_length)
        return self.plan

    def forwarded(
        self, base_length: int, prefix_digest: bytes, candidates: CandidateTree, fan_out: bool = False
    ) -> None:
        room = self._max_length - 1 - base_length
        asked = min([room, *self._asked_lengths])
        # A drafter that stopped where it doubts has not missed the depths behind.
        doubts = self.plan.min_confidence > 0 and candidates.certainty < self.plan.min_confidence
        short = candidates.draft_length < asked and not doubts
        self._in_flight.forwarded(base_length, prefix_digest, candidates, short, fan_out)
        if self._open_end is not None and base_length < len(self._log) and not fan_out:
            self._ahead_block(candidates.below(self._log.since(base_length)) is not None, self._open_end)

    def caught_up(self) -> None:
        """The drafter had to catch up for the block that came: the round says nothing about how long rounds take."""
        self._caught_up = True

    def nothing_proposed(self) -> None:
        """The drafter had no candidate for the end of the log."""
        if len(self._log) + 1 < self._max_length:
            self._policy.observe(NOTHING_PROPOSED)

    def committed(self, body: Committed, plain: bool, now: float) -> None:
        """The log grew by `body`. plain: the target goes on by itself."""
        outcome = self._in_flight.log_grew()
        self._tally.ahead(outcome)
        ahead = self._lies_ready
        self._lies_ready, self._open_end = False, None
        for block in outcome.decided:
            self._policy.observe(block)
            if block.full and self.plan.window > 1:
                self._followed(block.accepted, outcome)
        self._lies_ready = self._lies_ready or outcome.fan_out_hits > 0
        if body.repeated_answer:
            self._committed_at = None
            return
        accepted = self._tally.step(body)
        same_mode = self._committed_at is not None and plain == self._was_plain
        duration = now - (self._committed_at or now) if same_mode else None
        if body.num_draft_tokens:
            seen = None if plain or self._caught_up else duration
            self._policy.observe(Round(body.draft_length, accepted, body.num_draft_tokens, seen, body.step_time, ahead))
        else:
            in_vain = None if plain or self._caught_up else duration
            self._policy.observe(PlainStep(len(body.token_ids), duration if plain else None, in_vain, body.step_time))
        self._committed_at, self._was_plain, self._caught_up = now, plain, False

    def _followed(self, length: int, outcome: Outcome) -> None:
        """Looks for the block that was drafted on top of one which was right throughout."""
        if outcome.hits or outcome.misses:
            self._ahead_block(outcome.hits + outcome.fan_out_hits > 0, length)
        else:
            self._open_end = length

    def _ahead_block(self, hit: bool, length: int) -> None:
        self._open_end = None
        self._lies_ready = hit
        self._policy.observe(AheadBlock(hit, length))
