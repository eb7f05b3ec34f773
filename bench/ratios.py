"""Medians and means with a bootstrap interval, and whether they reach a goal."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.90
"""Share of the resamples that an interval holds."""

NEAR_ONE = 0.1
"""A goal this near to 1 is within what identical runs differ by: it is missed only if the whole interval misses it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should reach, at least or at most."""

    bound: float
    at_most: bool = False
    unit: str = ""

    def __str__(self) -> str:
        return f"at {'most' if self.at_most else 'least'} {self.bound:g}{' ' + self.unit if self.unit else ''}"

    def reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def verdict(self, middle: float, low: float, high: float) -> str:
        """met, within noise, or missed."""
        if self.reached(middle):
            return "met"
        near = not self.unit and abs(self.bound - 1) <= NEAR_ONE
        return "within noise" if near and self.reached(low if self.at_most else high) else "missed"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median (or mean) with its bootstrap interval over `count` values. goal "": it is only reported."""

    median: float
    low: float
    high: float
    count: int
    goal: str = ""
    verdict: str = ""

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)}, n = {self.count})"


def ratio(values: Sequence[float], goal: Goal | None = None, resamples: int = 2000) -> Ratio:
    """Median of `values` with its interval; the resampling is seeded. Raises ValueError if there are none."""
    return _resampled(statistics.median, values, goal, resamples)


def mean(values: Sequence[float], goal: Goal | None = None, resamples: int = 2000) -> Ratio:
    """Mean of `values` with its interval, where the values are themselves coarse. Raises ValueError if there are
    none."""
    return _resampled(statistics.fmean, values, goal, resamples)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _resampled(
    middle_of: Callable[[Sequence[float]], float], values: Sequence[float], goal: Goal | None, resamples: int
) -> Ratio:
    if not values:
        raise ValueError("a ratio needs at least one value")
    rng = random.Random(0)
    middles = sorted(middle_of(rng.choices(values, k=len(values))) for _ in range(resamples))
    outside = (1 - CONFIDENCE) / 2
    low, high = quantile(middles, outside), quantile(middles, 1 - outside)
    middle = middle_of(values)
    verdict = goal.verdict(middle, low, high) if goal else ""
    return Ratio(middle, low, high, len(values), str(goal) if goal else "", verdict)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) < 0.095 else f"{value:.2f}"
