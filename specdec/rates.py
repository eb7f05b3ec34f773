"""How likely a candidate is accepted, given that all above it were: by depth, with a prior per drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.estimates import RunningMean
from specdec.observations import BlockOutcome, Trial

LEVELS = (0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 0.98)
"""Chances of acceptance that a text is thought to have."""
_FIRST_GUESS = (0.04, 0.04, 0.06, 0.08, 0.12, 0.16, 0.18, 0.16, 0.11, 0.05)
"""How likely each is with a drafter that nothing is known of: mostly it has been chosen because it is good."""
_FIRST_GUESS_TRIALS = 5.0
_CHANGES = 1 / 32
"""How likely the text changes from one trial to the next; then it may be anything that the drafter has met."""
_PROPOSES_FADE = 0.95
_PROPOSES_PRIOR = 8
"""Askings that what a drafter proposes elsewhere weighs: texts find their matches in stretches, and a few askings in
vain say little of the next one."""
_LOOK_AT = 4
"""Tokens."""
_UNHEARD_OF = 0.05
"""Share of what may be that the drafter has never met."""
_LOWEST, _HIGHEST = 0.002, 0.99
_TRIALS_FOR_CERTAINTY = 20
_BINS = 16
"""Of confidences."""
_HEAVIEST = 1e9
_MEMORY = 0.995
"""Of what a drafter has met, per trial."""


class Rate:
    """A share of successes that forgets by the factor `keep` per trial."""

    __slots__ = ("_keep", "successes", "trials")

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self.successes = 0.0
        self.trials = 0.0

    def observe(self, success: bool) -> None:
        self.successes = self.successes * self._keep + success
        self.trials = self.trials * self._keep + 1

    def fade(self, keep: float) -> None:
        """Tells less by now."""
        self.successes *= keep
        self.trials *= keep

    def shrunk(self, prior: float, strength: float) -> float:
        """As if `strength` trials more had been seen, with the prior's share of successes."""
        return (self.successes + strength * prior) / (self.trials + strength)


class DrafterAcceptance:
    """What all sequences of one drafter had: the prior of the next one."""

    def __init__(self) -> None:
        self._met = [_FIRST_GUESS_TRIALS * share for share in _FIRST_GUESS]
        self.levels = self._levels()
        """How likely each of LEVELS is for a text that nothing is known of."""
        self._depths: list[tuple[Rate, RunningMean]] = []
        self.log_odds_offsets: list[float] = []
        """How much easier or harder each depth is than the mean depth, of those that were tried."""
        self._rescue = Rate(0.99)
        self._proposes = Rate(0.98)
        self._ahead = Rate(0.95)
        self._ahead_expected = 0.0
        self.certainty = Certainty()

    def _levels(self) -> list[float]:
        scale, floor = (1 - _UNHEARD_OF) / sum(self._met), _UNHEARD_OF / len(LEVELS)
        return [scale * met + floor for met in self._met]

    @property
    def proposes(self) -> float:
        """How often it has any candidate when it is asked."""
        return self._proposes.shrunk(0.9, 3)

    def observe_proposed(self, anything: bool) -> None:
        self._proposes.observe(anything)

    @property
    def rescue(self) -> float:
        """How likely one more sibling is the token when those before it are not."""
        return self._rescue.shrunk(0.2, 10)

    @property
    def ahead(self) -> float:
        """How often ahead blocks hit behind blocks that were right throughout, as a share of what was expected."""
        return min((self._ahead.successes + 5) / (self._ahead_expected + 5), 1.0)

    def observe_ahead(self, hit: bool, expected: float) -> None:
        self._ahead.observe(hit)
        self._ahead_expected = 0.95 * self._ahead_expected + expected

    def observe(self, trials: Sequence[Trial], rate: float, levels: Sequence[float]) -> None:
        """rate: the mean over the depths that was expected of this sequence, so that a depth which is tried most when
        all goes badly does not look hard for that. levels: how likely each is for it by now."""
        if not trials:
            return
        keep, count = _MEMORY ** len(trials), len(trials)
        self._met = [keep * met + count * level for met, level in zip(self._met, levels, strict=True)]
        self.levels = self._levels()
        for depth, trial in enumerate(trials):
            if depth == len(self._depths):
                self._depths.append((Rate(0.99), RunningMean(0.01)))
                self.log_odds_offsets.append(0.0)
            seen, expected = self._depths[depth]
            seen.observe(trial.rank == 0)
            expected.observe(rate)
            mean = expected.mean
            self.log_odds_offsets[depth] = _log_odds(seen.shrunk(mean, 40)) - _log_odds(mean)
            if trial.confidence is not None:
                self.certainty.observe(trial.confidence, trial.rank == 0)
            if trial.siblings > 1 and trial.rank != 0:
                self._rescue.observe(trial.rank is not None)


class Certainty:
    """What a drafter's confidences mean: a candidate of confidence c is accepted with probability about c to the power
    of `exponent`, and so is a path of the product of theirs. The exponent is the one under which as many candidates
    would have been accepted as were."""

    def __init__(self) -> None:
        self._accepted = Rate(_MEMORY)
        self._seen = [0.0] * _BINS
        """By confidence. The weight of the newest grows in place of all others fading."""
        self._weight = 1.0
        self._exponent: float | None = 1.0

    @property
    def known(self) -> bool:
        return self._accepted.trials >= _TRIALS_FOR_CERTAINTY

    @property
    def exponent(self) -> float:
        if self._exponent is None:
            self._exponent = self._fitted()
        return self._exponent

    def observe(self, confidence: float, accepted: bool) -> None:
        self._accepted.observe(accepted)
        self._weight /= _MEMORY
        self._seen[min(int(confidence * _BINS), _BINS - 1)] += self._weight
        if self._weight > _HEAVIEST:
            self._seen = [seen / self._weight for seen in self._seen]
            self._weight = 1.0
        self._exponent = None

    def threshold(self, chance: float) -> float:
        """The confidence that means a chance of acceptance of `chance`."""
        return math.pow(min(max(chance, 0.0), 1.0), 1 / self.exponent)

    def _fitted(self) -> float:
        accepted = self._accepted.successes * self._weight
        low, high = 0.25, 4.0
        for _ in range(6):
            middle = (low + high) / 2
            expected = sum(seen * math.pow(centre, middle) for seen, centre in zip(self._seen, _CENTRES, strict=True))
            low, high = (middle, high) if expected > accepted else (low, middle)
        return (low + high) / 2


class Acceptance:
    """Of one sequence: how likely each of LEVELS is, given its trials and that the text changes now and then (the
    forward algorithm of a hidden Markov model). So noise does little, and a few trials that fit nothing but a change
    are taken for one."""

    def __init__(self, drafter: DrafterAcceptance) -> None:
        self._drafter = drafter
        self._levels = drafter.levels
        self._proposes = Rate(0.9)
        self._untried = 0
        self.rate = _mean(self._levels)
        """Mean over the depths."""

    @property
    def proposes(self) -> float:
        return self._proposes.shrunk(self._drafter.proposes, _PROPOSES_PRIOR)

    def passed(self, tokens: int, asked: bool) -> None:
        """Tokens of which no trial tells: the text may have changed behind them, and if nobody asked the drafter, what
        it has to propose too."""
        self._untried += tokens
        if not asked:
            self._proposes.fade(_PROPOSES_FADE**tokens)
        if self._untried >= _LOOK_AT:
            self._drift()

    def _drift(self) -> None:
        kept = (1 - _CHANGES) ** self._untried
        self._untried = 0
        self._levels = [kept * a + (1 - kept) * b for a, b in zip(self._levels, self._drafter.levels, strict=True)]
        self.rate = _mean(self._levels)

    def observe(self, outcome: BlockOutcome) -> None:
        self._drift()
        self._proposes.observe(bool(outcome.trials))
        self._drafter.observe_proposed(bool(outcome.trials))
        expected = self.rate
        changed = [_CHANGES * other for other in self._drafter.levels]
        for trial in outcome.trials:
            seen = LEVELS if trial.rank == 0 else _MISSES
            levels = [
                ((1 - _CHANGES) * level + other) * chance
                for level, other, chance in zip(self._levels, changed, seen, strict=True)
            ]
            total = sum(levels)
            self._levels = [level / total for level in levels]
        self.rate = _mean(self._levels)
        self._drafter.observe(outcome.trials, expected, self._levels)

    def by_depth(self, count: int) -> tuple[float, ...]:
        base = _log_odds(self.rate)
        tried = [_odds_to_rate(base + offset) for offset in self._drafter.log_odds_offsets[:count]]
        return (*tried, *[_odds_to_rate(base)] * (count - len(tried)))


_CENTRES = tuple((i + 0.5) / _BINS for i in range(_BINS))
_MISSES = tuple(1 - level for level in LEVELS)


def _mean(levels: Sequence[float]) -> float:
    return sum(level * chance for level, chance in zip(LEVELS, levels, strict=True))


def _log_odds(rate: float) -> float:
    rate = min(max(rate, _LOWEST), _HIGHEST)
    return math.log(rate / (1 - rate))


def _odds_to_rate(log_odds: float) -> float:
    return min(max(1 / (1 + math.exp(-log_odds)), _LOWEST), _HIGHEST)
