"""What rounds cost, learned online: one model per target worker and one per drafter, shared by their sequences.

Times are in seconds. A *row* is one token of a packed forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from specdec.estimates import Curve, Knots, RunningMean
from specdec.probing import probe_share
from specdec.rates import DrafterAcceptance
from specdec.sharing import Member, Shares, share

_TRUSTED = 3
_PLAIN_STEPS = 3
_LOOK_AGAIN = 256
"""Steps without a plain one after which one is made, to know what it costs now."""
_LOOK_FOR = 32
"""If others always speculate in the same forward there is none: then it is not waited for longer."""
_SOON = 0.3
"""As a share of a forward."""
_ALONE = 8
"""Steps of one sequence after which nobody else is taken to share them."""
_IN_VAIN = 8
"""Times that a drafter must have been waited for before it is taken to have nothing at all."""
_VARY, _VARY_EARLY = 16, 4
_RETRY_FADE, _WAIT_FADE = 0.995, 0.998
"""What was learned of a way of working fades by this per round that works another way, so that it is tried again."""


@dataclass(frozen=True, slots=True)
class TargetStep:
    """One packed forward. rows: of all its sequences. context: tokens that they attended to, in sum. tokens: what they
    committed. ahead: a drafter was drafting meanwhile, as far as is known."""

    seconds: float
    rows: int
    context: int
    sequences: int = 1
    tokens: int = 1
    ahead: bool = False


class TargetModel:
    """T_verify(packed tokens, context) of one target worker, and who shares its steps. budget: rows of a forward."""

    def __init__(self, budget: int = 512) -> None:
        self._budget = budget
        self._curve = Curve(
            growth=0.5, offset=32.0, ridge=100.0
        )  # until it is seen: one row more costs next to nothing
        self._last_context = 0.0
        """Mean of a sequence: sums differ as batches do, and what one batch taught would say nothing of another."""
        self._rows = RunningMean(0.2)
        self._tokens = RunningMean(0.2)
        self._alone = _ALONE
        """Steps in a row that served one sequence."""
        self._members: dict[Hashable, Member] = {}
        self._allotted: dict[Hashable, int] = {}
        self._shares: Shares | None = None
        self._stretch = RunningMean()
        """The share by which rounds of a batch that speculates together take longer than what they are made of."""
        self._asked = 0
        self._knots: Knots | None = None
        self.turns = ""
        """What it takes turns for: never works at the same time as a drafter that names the same. Empty: nothing."""
        self.busy = 0.0
        """Seconds of all its steps: the clock that shares of its time are measured on."""
        self._plain_steps = 0
        self._steps_since_plain = 0
        self.ahead_extra = RunningMean()
        """How much longer a forward takes while a drafter works: on shared hardware, much."""
        self.plain_overhead = RunningMean()
        """Between two plain steps, besides the forward."""

    @property
    def known(self) -> bool:
        return self._curve.known

    @property
    def plain_known(self) -> bool:
        """It was seen lately what steps without candidates take: without that there is nothing to compare with."""
        if self._plain_steps < _PLAIN_STEPS:
            return self._steps_since_plain > _LOOK_FOR
        return not _LOOK_AGAIN <= self._steps_since_plain < _LOOK_AGAIN + _LOOK_FOR

    def observe(self, step: TargetStep) -> None:
        if step.rows <= step.sequences:
            self._plain_steps += 1
            self._steps_since_plain = 0
            self._stretch.fade(_RETRY_FADE)
        else:
            self._steps_since_plain += 1
        self.busy += step.seconds
        self._rows.observe(step.rows)
        self._tokens.observe(step.tokens)
        self._alone = self._alone + 1 if step.sequences == 1 else 0
        self._last_context = context = step.context / step.sequences
        if step.ahead and self._curve.count(step.rows) >= _TRUSTED:
            self.ahead_extra.observe(step.seconds - self.seconds(step.rows))
            return
        self.ahead_extra.fade(_RETRY_FADE)
        self._curve.observe(step.rows, step.seconds, context)
        self._knots = None

    @property
    def shared(self) -> bool:
        """Its steps serve several sequences, perhaps some of other schedulers."""
        return self._alone < _ALONE

    def knots(self) -> Knots:
        """Seconds by packed rows, in the context of the latest step."""
        if self._knots is None:
            self._knots = self._curve.knots(self._last_context)
        return self._knots

    def seconds(self, rows: float) -> float:
        return self.knots()(rows)

    def price(self, rows: int) -> float:
        """Seconds that so many rows more take."""
        usual = self._rows.mean
        return max(self.seconds(usual + rows) - self.seconds(usual), 0.0)

    def others(self, rows: float, tokens: float) -> tuple[float, float]:
        """Rows and committed tokens per step of the sequences beside one that has `rows` and `tokens`."""
        if not self._rows.count:
            return 0.0, 0.0
        return max(self._rows.mean - rows, 0.0), max(self._tokens.mean - tokens, 0.0)

    def allotment(self, name: Hashable, member: Member, wait: Callable[[int, int], float]) -> tuple[int, float]:
        """Candidates on the path that a member may have, of what all share by marginal gain, and by how much that
        raises the rate of all over plain decoding (0: unknown). Worked out anew when each has asked once. wait: see
        `share`."""
        is_new = name not in self._members
        self._members[name] = member
        if len(self._members) == 1 or not self.known:
            return len(member.acceptance), 0.0
        self._asked += 1
        if self._shares is None or is_new or name not in self._allotted or self._asked >= len(self._members):
            self._asked = 0
            members = list(self._members.values())
            stretch = 0.0 if self.in_step(wait) else self._stretch.mean
            self._shares = share(members, self.knots(), self._budget, wait, stretch)
            self._allotted = dict(zip(self._members, self._shares.lengths, strict=True))
        return self._allotted.get(name, len(member.acceptance)), self._shares.gain

    def observe_together(self, seconds: float) -> None:
        """A round of one of a batch most of which speculates took so long."""
        if self._shares is not None:
            self._stretch.observe(seconds / self._shares.seconds - 1)

    def in_step(self, wait: Callable[[int, int], float]) -> bool:
        """Its sequences wait for each other's blocks, as it holds forwards back: those come soon, or at least sooner
        than two forwards of half of them each take longer than one of all."""
        count = len(self._members)
        if count < 2 or not self.known:
            return False
        whole, missed = self.seconds(count), 2 * self.seconds(count / 2) - self.seconds(count)
        return wait(1, count) < max(_SOON * whole, missed)

    @property
    def num_members(self) -> int:
        """Sequences that share its rows."""
        return len(self._members)

    def leave(self, member: Hashable) -> None:
        self._members.pop(member, None)
        self._allotted.pop(member, None)


class DrafterModel:
    """T_draft(length, batch) of one draft worker, its link, its acceptance, and how rounds with it really go."""

    def __init__(self) -> None:
        self._curve = Curve(growth=1.0)  # until it is seen: a candidate takes as long as any other
        self._knots: dict[int, Knots] = {}
        """By sequences that are drafted together."""
        self._link = RunningMean()
        self.acceptance = DrafterAcceptance()
        self.active: set[Hashable] = set()
        """Sequences that speculate with it now."""
        self.turns = ""
        """As of a target."""
        self.prober: Hashable | None = None
        """The one sequence that probes it; the others wait."""
        self.rounds = 0
        """Speculative ones so far."""
        self.failed_probes = 0
        """In a row, of all its sequences."""
        self.probe_cost = RunningMean()
        """Seconds by which the steps of a target were longer for a probe: nothing on hardware of its own."""
        self._probe_after = 0.0
        self.wait_overhead = RunningMean()
        """Of a stop-and-wait round, besides verify, draft and link; so of the next three."""
        self._waits = 0
        self.step_overhead = RunningMean()
        """Without rounds that missed a forward."""
        self.hit_overhead = RunningMean()
        self.miss_overhead = RunningMean()

    @property
    def known(self) -> bool:
        """It has drafted, or has been waited for in vain so often that it looks as if it never would."""
        return self._curve.known or self._waits >= _IN_VAIN

    @property
    def link(self) -> float:
        """From asking until a block is here, besides drafting it."""
        return max(self._link.mean, 0.0)

    def observe_draft(self, length: int, seconds: float, ahead: bool = False) -> None:
        """A block of `length` > 0 candidates on its longest path took `seconds` in the worker."""
        batch = max(len(self.active), 1)
        if ahead and self._curve.known:
            return  # what working at the same time costs is in the overheads
        self._curve.observe(length, seconds, batch)
        self._knots.clear()

    def observe_wait(self, overhead: float, verify: float) -> None:
        """Of a round that waited for its block. verify: seconds of a forward of few rows."""
        self._waits += 1
        self.wait_overhead.observe(overhead)
        if overhead < verify / 2:
            self.step_overhead.observe(overhead)

    def waiting(self, shared: bool) -> float:
        """What a stop-and-wait round takes besides. shared: it may miss forwards, as rounds of large batches do."""
        usual = self.wait_overhead.mean
        return min(usual, self.step_overhead.mean) if self.step_overhead.count and not shared else usual

    def observe_link(self, seconds: float) -> None:
        self._link.observe(seconds)

    @property
    def should_vary(self) -> bool:
        """Now and then another length is drafted than the best, so that it is known how the costs depend on it."""
        return self.rounds % (_VARY_EARLY if self.rounds <= 2 * _VARY else _VARY) == _VARY_EARLY - 1

    def fade_waiting(self) -> None:
        """A plain step passed."""
        self.fade_ahead()
        self.wait_overhead.fade(_WAIT_FADE)

    def fade_ahead(self) -> None:
        """A round without draft-ahead passed."""
        self.hit_overhead.fade(_RETRY_FADE)
        self.miss_overhead.fade(_RETRY_FADE)

    def may_probe(self, target: TargetModel) -> bool:
        """Nobody does, and the last one has been paid for."""
        return self.prober is None and not target.busy < self._probe_after

    def probes(self, member: Hashable, target: TargetModel, length: int) -> None:
        """`member` asks for `length` candidates while `target` goes on."""
        self.prober = member
        cost = max(self.probe_cost.mean, 0.0) if self.probe_cost.count else self.knots()(length)
        cost += target.price(length)
        share = probe_share(self.failed_probes, target.num_members)
        self._probe_after = target.busy + cost / share

    def knots(self) -> Knots:
        """Seconds by draft length, in the batch of now."""
        return self._knots_of(max(len(self.active), 1))

    def _knots_of(self, batch: int) -> Knots:
        if batch not in self._knots:
            self._knots[batch] = self._curve.knots(batch)
        return self._knots[batch]

    def wait(self, longest: int, sequences: int) -> float:
        """Seconds of a round besides verifying, if so many sequences draft together."""
        return self._knots_of(sequences)(longest) + self.link + max(self.step_overhead.mean, 0.0)

    def leave(self, member: Hashable) -> None:
        self.active.discard(member)
        if self.prober is member:
            self.prober = None
