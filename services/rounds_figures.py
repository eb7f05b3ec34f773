"""What the last seconds were like, from the journals of all sequences: acceptance, speed, mode and why."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.entries import Admitted, Dropped, Ended, Entry, FellBack, Placed, Step
from services.rounds_text import NO_DRAFTER, NO_REASONS, fallback_text, reason_text
from specdec.goodput import Explained

SECONDS = 60
"""How far back figures go."""
SHOWN_SECONDS = 10
MAX_DEPTH = 32
"""Candidates deeper than this are not counted by position."""


@dataclass(slots=True)
class Counts:
    """Of one second, or of several. *_time, *_timed: seconds between two commits of one sequence in the same mode, and
    the tokens of the later ones. rounds_drafted, rounds_accepted: rounds by how many depths they verified, and by how
    many candidates were accepted."""

    tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    ahead_rounds: int = 0
    stale_blocks: int = 0
    speculative_time: float = 0.0
    speculative_timed: int = 0
    plain_time: float = 0.0
    plain_timed: int = 0
    rounds_drafted: Counter[int] = field(default_factory=Counter)
    rounds_accepted: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    @property
    def decoding_time(self) -> float:
        return self.speculative_time + self.plain_time

    def add(self, other: Counts) -> None:
        for name in Counts.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, name, mine + theirs)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the last `seconds`. Rates in tokens per second: speculative_rate, plain_rate as one sequence saw them in that
    mode (plain_rate: also from before), None where nothing is known; expected_rate, expected_plain_rate of the latest
    decision, if the policy gives reasons. mode: speculative, plain, mixed, idle."""

    seconds: float
    counts: Counts
    speculative_rate: float | None
    plain_rate: float | None
    expected_rate: float | None
    expected_plain_rate: float | None
    mode: str
    reason: str

    @property
    def tokens_per_second(self) -> float:
        return self.counts.tokens / self.seconds

    @property
    def tokens_per_verify(self) -> float | None:
        return self.counts.round_tokens / self.counts.rounds if self.counts.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.counts.accepted / self.counts.drafted if self.counts.drafted else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of the rounds that drafted so deep, the share in which that candidate was accepted; by depth from 0."""
        drafted, accepted = self.counts.rounds_drafted, self.counts.rounds_accepted
        deepest = min(max(drafted, default=0), MAX_DEPTH)
        return [_deeper(accepted, depth) / _deeper(drafted, depth) for depth in range(deepest)]


class LiveFigures:
    """`read` is a reader of the scheduler's journals. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, Counts]] = deque(maxlen=SECONDS)
        self._prompts: dict[str, int] = {}
        self._last: dict[str, tuple[float, bool]] = {}
        self._plain_rate: float | None = None
        self._decision: Explained | None = None
        self._without_drafter: set[str] = set()
        self._has_drafter = True
        self._fallback = ""

    def read(self, entry: Entry) -> None:
        match entry:
            case Step():  # most are
                self._step(entry)
            case Admitted():
                self._prompts[entry.sequence_id] = entry.prompt_tokens
            case Placed():
                self._last.pop(entry.sequence_id, None)
                (self._without_drafter.discard if entry.draft_worker else self._without_drafter.add)(entry.sequence_id)
            case Dropped():
                self._now().stale_blocks += 1
            case FellBack():
                self._now().fallbacks[entry.reason] += 1
                self._fallback = entry.reason
            case Ended():
                self._last.pop(entry.sequence_id, None)
                self._prompts.pop(entry.sequence_id, None)
                self._without_drafter.discard(entry.sequence_id)

    def by_second(self, seconds: int = SECONDS) -> list[tuple[int, float]]:
        """For each of the last whole seconds: tokens, and for how long sequences decoded, added up."""
        now = int(self._clock())
        known = {second: (counts.tokens, counts.decoding_time) for second, counts in self._seconds}
        return [known.get(second, (0, 0.0)) for second in range(now - seconds, now)]

    def figures(self, seconds: int = SHOWN_SECONDS) -> Figures:
        """seconds: at most SECONDS."""
        oldest = int(self._clock()) - seconds
        counts = Counts()
        for second, of_second in self._seconds:
            if second > oldest:
                counts.add(of_second)
        plain_rate = _rate(counts.plain_timed, counts.plain_time) or self._plain_rate
        decision = self._decision
        known = decision is not None and decision.goodput > 0
        return Figures(
            seconds,
            counts,
            _rate(counts.speculative_timed, counts.speculative_time),
            plain_rate,
            decision.goodput if decision and known else None,
            decision.plain if decision and known else None,
            _mode(counts),
            self._reason(counts),
        )

    def _step(self, step: Step) -> None:
        counts, tokens = self._now(), len(step.token_ids)
        is_round = step.num_draft_tokens > 0
        counts.tokens += tokens
        if is_round:
            accepted = step.accepted
            counts.rounds += 1
            counts.round_tokens += tokens
            counts.drafted += step.num_draft_tokens
            counts.accepted += accepted
            counts.ahead_rounds += bool(step.draft and step.draft.ahead)
            counts.rounds_drafted[verified_depth(step, self._prompts.get(step.sequence_id, 0))] += 1
            counts.rounds_accepted[accepted] += 1
            self._fallback = ""
        else:
            counts.plain_steps += 1
        self._time(counts, step, tokens, is_round)
        self._decision = step.decision
        self._has_drafter = step.sequence_id not in self._without_drafter

    def _time(self, counts: Counts, step: Step, tokens: int, is_round: bool) -> None:
        before = self._last.get(step.sequence_id)
        self._last[step.sequence_id] = step.at, is_round
        if before is None or before[1] != is_round:
            return
        seconds = step.at - before[0]
        if is_round:
            counts.speculative_time += seconds
            counts.speculative_timed += tokens
        else:
            counts.plain_time += seconds
            counts.plain_timed += tokens
            self._plain_rate = _rate(counts.plain_timed, counts.plain_time) or self._plain_rate

    def _reason(self, counts: Counts) -> str:
        if not counts.rounds and not counts.plain_steps:
            return "no request ran lately"
        if self._fallback:
            return fallback_text(self._fallback)
        if not self._has_drafter:
            return NO_DRAFTER
        return reason_text(self._decision) if self._decision is not None else NO_REASONS

    def _now(self) -> Counts:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counts()))
        return self._seconds[-1][1]


def verified_depth(step: Step, prompt_tokens: int) -> int:
    """Depths of the candidates that this step verified; 0 for a plain step. Of a block whose first candidates were
    committed before it was verified, only what lay below them."""
    if not step.num_draft_tokens or step.draft is None:
        return step.num_draft_tokens
    return max(step.draft.candidates.draft_length - used_up(step, prompt_tokens), step.accepted, 1)


def used_up(step: Step, prompt_tokens: int) -> int:
    """How many tokens on the way down its block were committed before this step verified it."""
    return max(prompt_tokens + step.position - step.draft.base_length, 0) if step.draft else 0


def _deeper(rounds: Counter[int], depth: int) -> int:
    """Rounds that went deeper than `depth`."""
    return sum(count for reached, count in rounds.items() if reached > depth)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _mode(counts: Counts) -> str:
    if counts.rounds:
        return "mixed" if counts.plain_steps else "speculative"
    return "plain" if counts.plain_steps else "idle"
