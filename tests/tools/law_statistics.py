"""Whether counts follow a law: chi-square, and not one draw that the law excludes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

ALPHA = 1e-3
_LEAST_EXPECTED = 5.0
_IMPOSSIBLE = 1e-12
"""Expected draws at most of a token that the law excludes."""


class LawViolation(AssertionError):
    """The draws do not follow the law; the message holds the p-value or the count of impossible draws."""


@dataclass(frozen=True)
class Fit:
    """p_value: of the chi-square test. violations: draws of what the law excludes."""

    p_value: float
    violations: int

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64], law: npt.NDArray[np.float64]) -> Fit:
        """counts, law: same shape; the law sums to 1. Rare outcomes are counted together."""
        observed, expected = counts.ravel(), law.ravel() * counts.sum()
        violations = int(observed[expected < _IMPOSSIBLE].sum())
        common = expected >= _LEAST_EXPECTED
        rest = expected[~common].sum()
        seen, wanted = observed[common].astype(float), expected[common]
        if rest >= _LEAST_EXPECTED:
            seen, wanted = np.append(seen, observed[~common].sum()), np.append(wanted, rest)
        if len(seen) < 2:
            return cls(1.0, violations)
        statistic = float(((seen - wanted) ** 2 / wanted).sum())
        return cls(float(stats.chi2.sf(statistic, len(seen) - 1)), violations)


def require(what: str, fit: Fit, comparisons: int) -> None:
    """Raises LawViolation. comparisons: how many fits are tried in all; under Holm's procedure none of them is rejected
    exactly if no p-value is below ALPHA / comparisons, so that each can be judged alone."""
    if fit.violations:
        raise LawViolation(f"{what}: {fit.violations} draws outside the support")
    if fit.p_value < ALPHA / comparisons:
        raise LawViolation(f"{what}: p = {fit.p_value:.2g} < {ALPHA / comparisons:.2g}")
