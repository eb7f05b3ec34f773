"""Whether counts follow a law: chi-square, and not one draw that the law excludes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

ALPHA = 1e-3
_LEAST_EXPECTED = 5.0
_IMPOSSIBLE = 1e-12
"""Probability at most of what the law excludes."""


class LawViolation(AssertionError):
    """The draws do not follow the law; the message holds the p-value or the count of impossible draws."""


@dataclass(frozen=True)
class Fit:
    """p_value: of the chi-square test. violations: draws of what the law excludes."""

    p_value: float
    violations: int

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64], law: npt.NDArray[np.float64]) -> Fit:
        """counts, law: same shape; the law sums to 1."""
        return cls.of_rows(counts.reshape(1, -1), law.reshape(1, -1))

    @classmethod
    def of_rows(cls, counts: npt.NDArray[np.int64], laws: npt.NDArray[np.float64]) -> Fit:
        """One fit of many independent laws, [laws, outcomes], each with its own number of draws. Rare outcomes of a law
        are counted together."""
        statistic, freedom, violations = 0.0, 0, 0
        for observed, law in zip(counts, laws, strict=True):
            expected = law * observed.sum()
            violations += int(observed[law < _IMPOSSIBLE].sum())
            common = expected >= _LEAST_EXPECTED
            seen, wanted = observed[common].astype(float), expected[common]
            rest = expected[~common].sum()
            if rest >= _LEAST_EXPECTED:
                seen, wanted = np.append(seen, observed[~common].sum()), np.append(wanted, rest)
            if len(seen) > 1:
                statistic += float(((seen - wanted) ** 2 / wanted).sum())
                freedom += len(seen) - 1
        return cls(float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0, violations)


def require(what: str, fit: Fit, comparisons: int) -> None:
    """Raises LawViolation. comparisons: how many fits are tried in all; under Holm's procedure none of them is rejected
    exactly if no p-value is below ALPHA / comparisons, so that each can be judged alone."""
    if fit.violations:
        raise LawViolation(f"{what}: {fit.violations} draws outside the support")
    if fit.p_value < ALPHA / comparisons:
        found = f"p = {fit.p_value:.2g}" if fit.p_value else "p < 1e-300"
        raise LawViolation(f"{what}: {found}, at least {ALPHA / comparisons:.2g} wanted")
