"""The goodput policy of one sequence: what it has seen itself, the shared cost models, and `choose`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from specdec.costs import DrafterModel, TargetModel
from specdec.decision import OFF, Decision
from specdec.estimates import Knots, RunningMean
from specdec.goodput import Explained, Inputs, Overheads, choose, price_of_one_more
from specdec.observations import AheadBlock, BlockOutcome, Observation, PlainStep, Round
from specdec.probing import Probing, probe_length
from specdec.rates import Acceptance
from specdec.sharing import Member

_LOW = 0.5
_MEMBERS_PER_ROUND = 8
"""A decision stands for one round more for each so many sequences that share the target, ..."""
_MOVED = 0.05
"""... unless the acceptance of the sequence has moved by this."""
_EXPLANATIONS = 128
_GOES_FARTHER = 4
"""Candidates more than what pays on the average, where the drafter is sure of them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """draft_length: of the first block with a drafter that nothing is known of. max_draft_time: seconds that a block
    may take to draft, well below what it would be late at."""

    draft_length: int = 5
    max_draft_length: int = 16
    max_width: int = 1
    max_window: int = 8
    max_draft_time: float = 1.0


class GoodputPolicy:
    """Implements `specdec.policy.SpeculationPolicy`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._target = TargetModel()
        self._drafter: DrafterModel | None = None
        self._acceptance: Acceptance | None = None
        self._decision = OFF
        self._probing: Probing | None = None
        self._probe_cost: float | None = None
        """Seconds so far, of a probe that is under way."""
        self._standing = 0
        self._decided_at = (0.0, 0.0)
        """Rounds for which the latest decision still stands, and what it was made at: acceptance, and how often the
        drafter proposes anything."""
        self._tokens, self._seconds = RunningMean(0.1), RunningMean(0.1)
        """Of its own rounds."""
        self._explained: deque[Explained] = deque(maxlen=_EXPLANATIONS)

    # ---- the seam

    def attach(self, target: TargetModel, drafter: DrafterModel | None) -> None:
        self._standing = 0
        if target is not self._target:
            self._target.leave(self)
            self._target = target
        if drafter is not self._drafter:
            if self._drafter is not None:
                self._drafter.leave(self)
            self._drafter = drafter
            self._acceptance = Acceptance(drafter.acceptance) if drafter else None
            self._probing = None
            self._decision = OFF

    def decide(self) -> Decision:
        if self._drafter is None or self._acceptance is None:
            return OFF
        if self._stands(self._acceptance):
            last = self._explained[-1]
            if self._decision.off:
                return self._take(self._off(self._drafter, last))
            return self._take(last, self._decision)
        inputs = self._inputs(self._drafter, self._acceptance)
        if not self._target.plain_known:
            return self._take(Explained(inputs, OFF, 0.0, 0.0, "first to know what a plain step takes"))
        if not self._drafter.known:
            first = Decision(self._first_length)
            return self._take(Explained(inputs, first, 0.0, 0.0, "nothing is known of the drafter yet"))
        explained = choose(inputs, self._decision)
        self._standing = self._target.num_members // _MEMBERS_PER_ROUND
        self._decided_at = self._acceptance.rate, self._acceptance.proposes
        if explained.decision == OFF:
            return self._take(self._off(self._drafter, explained))
        decision = self._doubting(explained, self._drafter, self._varied(self._drafter, explained.decision))
        usual = explained.decision
        return self._take(explained if decision is usual else replace(explained, decision=decision), usual)

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, BlockOutcome):
            self._block(observation)
        elif isinstance(observation, Round):
            self._round(observation)
        elif isinstance(observation, AheadBlock):
            self._ahead(observation)
        else:
            self._plain(observation)

    def explained(self) -> Sequence[Explained]:
        return self._explained

    def close(self) -> None:
        self._target.leave(self)
        if self._drafter is not None:
            self._drafter.leave(self)

    # ---- deciding

    def _stands(self, acceptance: Acceptance) -> bool:
        """The decision before is near enough: deciding costs the scheduler time for each sequence of a large batch."""
        if self._standing <= 0 or not self._target.plain_known:
            return False
        self._standing -= 1
        rate, proposes = self._decided_at
        return abs(acceptance.rate - rate) < _MOVED and abs(acceptance.proposes - proposes) < _MOVED

    def _inputs(self, drafter: DrafterModel, acceptance: Acceptance) -> Inputs:
        limits, target = self._limits, self._target
        by_depth = acceptance.by_depth(limits.max_draft_length)
        draft = drafter.knots()
        turns = bool(target.turns) and target.turns == drafter.turns
        other_rows, other_tokens = self._others(drafter, by_depth) if target.shared else (0.0, 0.0)
        allotted, together = target.allotment(self, Member(by_depth, acceptance.proposes), drafter.wait)
        return Inputs(
            acceptance=by_depth,
            verify=target.knots(),
            draft=draft,
            link=drafter.link,
            proposes=acceptance.proposes,
            rescue=drafter.acceptance.rescue,
            ahead=drafter.acceptance.ahead,
            ahead_extra=target.ahead_extra.mean,
            turns=turns,
            overheads=Overheads(
                target.plain_overhead.mean,
                drafter.waiting(target.shared),
                drafter.hit_overhead.mean,
                drafter.miss_overhead.mean,
            ),
            other_rows=other_rows,
            other_tokens=other_tokens,
            together=together,
            in_step=target.in_step(drafter.wait) and not turns,
            max_draft_length=min(self._longest(draft), allotted),
            max_width=limits.max_width,
            max_window=1 if turns else limits.max_window,
        )

    def _others(self, drafter: DrafterModel, acceptance: Sequence[float]) -> tuple[float, float]:
        """Rows and committed tokens per step of the sequences beside this one, which is not in all of them."""
        target, last = self._target, self._decision
        rows, tokens = float(last.rows), 1 + sum(accumulate(acceptance[: last.draft_length], mul))
        if last.window == 1 and not last.off:
            wait = drafter.knots()(last.draft_length) + drafter.link + drafter.waiting(target.shared)
            present = target.seconds(rows) / max(target.seconds(rows) + wait, 1e-9)
            rows, tokens = rows * present, tokens * present
        return target.others(rows, tokens)

    @property
    def _first_length(self) -> int:
        """Of a block with a drafter that nothing is known of: what many find out together costs each little."""
        length = min(self._limits.draft_length, self._limits.max_draft_length)
        return max(length // max(self._target.num_members, 1), 1)

    def _longest(self, draft: Knots) -> int:
        """Draft length that can be had in time."""
        limits = self._limits
        in_time = (n for n in range(limits.max_draft_length, 1, -1) if draft(n) <= limits.max_draft_time)
        return next(in_time, 1)

    def _off(self, drafter: DrafterModel, explained: Explained) -> Explained:
        """Off, or a probe if one is due and no other sequence is probing."""
        if self._probing is None:
            self._probing = Probing(drafter.failed_probes)
        if not self._probing.due or not (self._probing.urgent or drafter.may_probe(self._target)):
            return explained
        self._standing = 0
        self._probing.started()
        self._probe_cost = 0.0
        length = min(probe_length(drafter.knots(), self._target.seconds(1)), self._limits.max_draft_length)
        drafter.probes(self, self._target, length)
        return replace(explained, decision=Decision(length, probe=True), note="probe")

    def _varied(self, drafter: DrafterModel, decision: Decision) -> Decision:
        if not drafter.should_vary or decision.draft_length < 2:
            return decision
        return replace(decision, draft_length=(decision.draft_length + 1) // 2)

    def _doubting(self, explained: Explained, drafter: DrafterModel, decision: Decision) -> Decision:
        """A drafter that knows how sure it is may go on farther where it is sure, and stops where it doubts."""
        certainty, inputs = drafter.acceptance.certainty, explained.inputs
        if not certainty.known or decision.window > 1:
            return decision
        # At the rate that is really reached: the expected one is that of the candidates it is sure of.
        rate = explained.goodput
        if self._seconds.count:
            rate = self._tokens.mean / max(self._seconds.mean, 1e-6)
            rate += inputs.other_tokens / inputs.verify(inputs.other_rows + 1)
        worth = rate * price_of_one_more(inputs, decision) / max(inputs.acceptance[decision.draft_length - 1], 0.05)
        longest = min(decision.draft_length + _GOES_FARTHER, inputs.max_draft_length)
        return replace(decision, draft_length=longest, min_confidence=certainty.threshold(worth))

    def _take(self, explained: Explained, usual: Decision | None = None) -> Decision:
        """usual: what pays on the average, where the drafter may go on farther."""
        decision = explained.decision
        self._explained.append(explained)
        self._decision = OFF if decision.probe else usual or decision
        if self._drafter is not None:
            if self._decision.off:
                self._drafter.active.discard(self)
            else:
                self._drafter.active.add(self)
                self._stop_probing(self._drafter)
        return decision

    def _stop_probing(self, drafter: DrafterModel) -> None:
        self._probing = None
        drafter.failed_probes = 0
        if drafter.prober is self:
            drafter.prober = None

    # ---- observing

    def _block(self, outcome: BlockOutcome) -> None:
        if self._drafter is None or self._acceptance is None:
            return
        was_low = min(self._acceptance.rate, self._acceptance.proposes) < _LOW
        self._acceptance.observe(outcome)
        if self._probing is not None and self._probing.waiting:
            self._judge(self._probing, self._drafter, outcome, was_low)

    def _ahead(self, block: AheadBlock) -> None:
        if self._drafter is not None and self._acceptance is not None:
            expected = self._acceptance.by_depth(block.length + 1)[-1]
            self._drafter.acceptance.observe_ahead(block.hit, expected)

    def _judge(self, probing: Probing, drafter: DrafterModel, outcome: BlockOutcome, was_low: bool) -> None:
        if was_low and outcome.trials and 2 * outcome.accepted >= len(outcome.trials):
            probing.promising()
        else:
            probing.failed()
        drafter.prober = None
        drafter.failed_probes = probing.failures

    def _round(self, round_: Round) -> None:
        self._probe_paid()
        if self._drafter is None or round_.duration is None or self._decision.off:
            return
        drafter, verify = self._drafter, self._target.knots()
        drafter.rounds += 1
        self._tokens.observe(round_.accepted + 1)
        self._seconds.observe(round_.duration)
        others = self._target.others(1 + round_.num_candidates, 0)[0] if self._target.shared else 0.0
        seconds = verify(others + 1 + round_.num_candidates)
        draft = drafter.knots()(round_.drafted)
        waited = seconds + draft + drafter.link
        window = self._decision.window
        if window == 1:
            overhead = round_.duration - round_.step_time - draft - drafter.link
            drafter.observe_wait(overhead, self._target.seconds(1))
            if 2 * len(drafter.active) > self._target.num_members > 1:
                self._target.observe_together(round_.duration)
            drafter.fade_ahead()
        elif round_.ahead:
            seconds += self._target.ahead_extra.mean
            whole = waited + self._target.ahead_extra.mean + drafter.waiting(self._target.shared)
            drafter.hit_overhead.observe(round_.duration - max(seconds, draft, whole / window))
        else:
            whole = waited + self._target.ahead_extra.mean + drafter.waiting(self._target.shared)
            drafter.miss_overhead.observe(round_.duration - whole)

    def _plain(self, step: PlainStep) -> None:
        if self._acceptance is not None:
            self._acceptance.passed(step.tokens, asked=step.in_vain is not None)
        if step.duration is not None and self._target.known:
            if self._probe_cost is None:
                self._target.plain_overhead.observe(step.duration - step.step_time)
            else:
                others = self._target.others(1, 1)[0] if self._target.shared else 0.0
                usual = self._target.seconds(others + 1) + self._target.plain_overhead.mean
                self._probe_cost += step.duration - usual
        if self._probing is not None:
            waiting = self._probing.waiting
            self._probing.passed(step.tokens)
            if waiting and not self._probing.waiting and self._drafter is not None:
                self._drafter.leave(self)
        self._probe_paid()
        if self._drafter is not None and step.duration is not None:
            self._drafter.fade_waiting()
        if self._drafter is not None and step.in_vain is not None:
            waited = step.in_vain - step.step_time
            overhead = waited - self._drafter.knots()(1) - self._drafter.link
            self._drafter.observe_wait(overhead, self._target.seconds(1))

    def _probe_paid(self) -> None:
        """After a step: if what became of the probe is known, all that it cost is too."""
        if self._probe_cost is not None and not (self._probing and self._probing.waiting):
            if self._drafter is not None:
                self._drafter.probe_cost.observe(self._probe_cost)
            self._probe_cost = None
