"""How likely a candidate is accepted, given that all above it were: by depth, with a prior per drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.estimates import RunningMean
from specdec.observations import BlockOutcome, Trial

_FIRST_GUESS = 0.7
_LOWEST, _HIGHEST = 0.002, 0.99
_TRIALS_FOR_CERTAINTY = 20
_SHIFT = 2.0
"""Change of the log odds that is looked for."""
_CERTAIN = 5.0
"""Log likelihood ratio above which the text counts as changed."""


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

    def shrunk(self, prior: float, strength: float) -> float:
        """As if `strength` trials more had been seen, with the prior's share of successes."""
        return (self.successes + strength * prior) / (self.trials + strength)


class DrafterAcceptance:
    """What all sequences of one drafter had: the prior of the next one."""

    def __init__(self) -> None:
        self._all = Rate(0.98)
        self._depths: list[tuple[Rate, RunningMean]] = []
        self._rescue = Rate(0.99)
        self._ahead = Rate(0.95)
        self._ahead_expected = 0.0
        self.certainty = Certainty()

    @property
    def rate(self) -> float:
        return self._all.shrunk(_FIRST_GUESS, 2)

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

    def observe(self, trials: Sequence[Trial], rate: float) -> None:
        """rate: the mean over the depths that was expected of this sequence, so that a depth which is tried most when
        all goes badly does not look hard for that."""
        for depth, trial in enumerate(trials):
            if depth == len(self._depths):
                self._depths.append((Rate(0.99), RunningMean(0.01)))
            self._all.observe(trial.rank == 0)
            self._depths[depth][0].observe(trial.rank == 0)
            self._depths[depth][1].observe(rate)
            if trial.confidence is not None:
                self.certainty.observe(trial.confidence, trial.rank == 0)
            if trial.siblings > 1 and trial.rank != 0:
                self._rescue.observe(trial.rank is not None)

    def log_odds_offset(self, depth: int) -> float:
        """How much easier or harder this depth is than the mean depth."""
        if depth >= len(self._depths):
            return 0.0
        seen, expected = self._depths[depth]
        return _log_odds(seen.shrunk(expected.mean, 40)) - _log_odds(expected.mean)


class Certainty:
    """What a drafter's confidences mean: a candidate of confidence c is accepted with probability about c to the power
    of `exponent`, and so is a path of the product of theirs."""

    def __init__(self) -> None:
        self._accepted = Rate(0.99)
        self._log_confidence = RunningMean(0.02)

    @property
    def known(self) -> bool:
        return self._accepted.trials >= _TRIALS_FOR_CERTAINTY

    @property
    def exponent(self) -> float:
        accepted = min(max(self._accepted.shrunk(0.8, 2), 0.05), 0.98)
        return min(max(math.log(accepted) / min(self._log_confidence.mean, -1e-3), 0.25), 4.0)

    def observe(self, confidence: float, accepted: bool) -> None:
        self._accepted.observe(accepted)
        self._log_confidence.observe(math.log(max(confidence, _LOWEST)))

    def threshold(self, chance: float) -> float:
        """The confidence that means a chance of acceptance of `chance`."""
        return math.pow(min(max(chance, 0.0), 1.0), 1 / self.exponent)


class _Change:
    """Whether the trials of late fit another rate much better than the one expected: Page's cumulative sum test, for
    one direction. `since` holds the trials since the change would have begun."""

    def __init__(self, shift: float) -> None:
        self._shift = shift
        self._evidence = 0.0
        self.since = Rate(1.0)

    def observe(self, success: bool, expected: float) -> bool:
        """True if it is certain enough."""
        other = _odds_to_rate(_log_odds(expected) + self._shift)
        self._evidence += math.log(other / expected) if success else math.log((1 - other) / (1 - expected))
        if self._evidence <= 0:
            self._evidence, self.since = 0.0, Rate(1.0)
            return False
        self.since.observe(success)
        return self._evidence > _CERTAIN


class Acceptance:
    """Of one sequence. It forgets slowly, so that noise does little; where the text changes for certain, it forgets all
    that was before."""

    def __init__(self, drafter: DrafterAcceptance) -> None:
        self._drafter = drafter
        self._all = Rate(0.97)
        self._depths: list[Rate] = []
        self._prior_strength = 4.0
        self._changes = (_Change(-_SHIFT), _Change(_SHIFT))

    @property
    def rate(self) -> float:
        return self._all.shrunk(self._drafter.rate, self._prior_strength)

    def observe(self, outcome: BlockOutcome) -> None:
        self._drafter.observe(outcome.trials, self.rate)
        for depth, trial in enumerate(outcome.trials):
            first = trial.rank == 0
            expected = min(max(self.rate, 0.03), 0.97)
            self._all.observe(first)
            if depth == len(self._depths):
                self._depths.append(Rate(0.9))
            self._depths[depth].observe(first)
            changed = [change for change in self._changes if change.observe(first, expected)]
            if changed:
                self._begin_again(changed[0].since)

    def _begin_again(self, since: Rate) -> None:
        self._all.successes, self._all.trials = since.successes, since.trials
        self._depths = [Rate(0.9) for _ in self._depths]
        self._prior_strength = 0.5  # what the drafter did elsewhere is no guide to what begins here
        self._changes = (_Change(-_SHIFT), _Change(_SHIFT))

    def by_depth(self, count: int) -> tuple[float, ...]:
        base = _log_odds(self.rate)
        rates = []
        for depth in range(count):
            expected = _odds_to_rate(base + self._drafter.log_odds_offset(depth))
            seen = self._depths[depth].shrunk(expected, 12) if depth < len(self._depths) else expected
            rates.append(min(max(seen, _LOWEST), _HIGHEST))
        return tuple(rates)


def _log_odds(rate: float) -> float:
    rate = min(max(rate, _LOWEST), _HIGHEST)
    return math.log(rate / (1 - rate))


def _odds_to_rate(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))
