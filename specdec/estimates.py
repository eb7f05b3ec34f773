"""Running estimates of noisy times: means, curves and slopes that forget, and that one outlier does not move far."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from statistics import median

_CLIP = 4.0
"""An observation farther from the mean than so many mean deviations counts as being that far."""
_TRUSTED_AFTER = 5
_BUCKETS_PER_OCTAVE = 3


class RunningMean:
    """The median of the first observations, since the very first are often slow; then a mean in which each new one has
    the weight `rate`."""

    __slots__ = ("_deviation", "_first", "_rate", "count", "mean")

    def __init__(self, rate: float = 0.1, mean: float = 0.0) -> None:
        self._rate = rate
        self._first: list[float] = []
        self._deviation = 0.0
        self.mean = mean
        self.count = 0

    def observe(self, value: float) -> None:
        self.count += 1
        if self.count <= _TRUSTED_AFTER:
            self._first.append(value)
            self.mean = median(self._first)
            self._deviation = median([abs(seen - self.mean) for seen in self._first])
            return
        limit = _CLIP * self._deviation + 0.02 * abs(self.mean)
        error = min(max(value - self.mean, -limit), limit)
        self.mean += self._rate * error
        self._deviation += self._rate * (abs(error) - self._deviation)

    def fade(self, keep: float) -> None:
        """Back towards 0, for what has not been observed for long."""
        if self.mean:
            self.mean *= keep
            self._first.clear()
            self.count = min(self.count, 1)


class Slope:
    """How much the mean of y rises per unit of x: least squares around running means, drawn to 0 by `ridge`."""

    __slots__ = ("_covariance", "_rate", "_ridge", "_variance", "_x", "_y")

    def __init__(self, ridge: float, rate: float = 0.02) -> None:
        self._ridge = ridge
        self._rate = rate
        self._x = RunningMean(rate)
        self._y = RunningMean(rate)
        self._covariance = 0.0
        self._variance = 0.0

    def observe(self, x: float, y: float) -> None:
        self._x.observe(x)
        self._y.observe(y)
        dx = x - self._x.mean
        self._covariance += self._rate * (dx * (y - self._y.mean) - self._covariance)
        self._variance += self._rate * (dx * dx - self._variance)

    def __call__(self, x: float) -> float:
        """What to add to the mean of y at `x`."""
        return max(self._covariance, 0.0) / (self._variance + self._ridge) * (x - self._x.mean)


@dataclass(frozen=True, slots=True)
class Knots:
    """A curve through (x, y), x ascending: straight between them, and beyond them along the common slope. Without two
    of them y rises by the share `growth` when x + `offset` doubles. No knots: 0."""

    points: tuple[tuple[float, float], ...] = ()
    growth: float = 0.5
    offset: float = 0.0
    add: float = 0.0

    def __call__(self, x: float) -> float:
        points = self.points
        if not points:
            return self.add
        at = bisect_left(points, (x,))
        if 0 < at < len(points):
            (x0, y0), (x1, y1) = points[at - 1], points[at]
            return self.add + y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        near_x, near_y = points[0] if at == 0 else points[-1]
        return self.add + max(near_y + self._slope(near_x, near_y) * (x - near_x), 0.1 * near_y)

    def _slope(self, near_x: float, near_y: float) -> float:
        count = len(self.points)
        if count < 2:
            return self.growth * near_y / (near_x + self.offset)
        mean_x = sum(x for x, _ in self.points) / count
        mean_y = sum(y for _, y in self.points) / count
        rise = sum((x - mean_x) * (y - mean_y) for x, y in self.points)
        return max(rise / sum((x - mean_x) ** 2 for x, _ in self.points), 0.0)


class Curve:
    """y over x >= 1, learned in buckets that grow with x. A bucket forgets only when it is visited, so that what was
    learned in one state of the system is still known when that state comes back."""

    def __init__(self, growth: float, offset: float = 0.0) -> None:
        self._growth = growth
        self._offset = offset
        self._buckets: dict[int, tuple[RunningMean, RunningMean]] = {}
        self._points: tuple[tuple[float, float], ...] | None = ()

    @property
    def known(self) -> bool:
        return bool(self._buckets)

    def count(self, x: float) -> int:
        """Observations near `x`."""
        bucket = self._buckets.get(_bucket(x))
        return bucket[1].count if bucket else 0

    def observe(self, x: float, y: float) -> None:
        bucket = self._buckets.setdefault(_bucket(x), (RunningMean(), RunningMean()))
        bucket[0].observe(x)
        bucket[1].observe(y)
        self._points = None

    def knots(self, add: float = 0.0) -> Knots:
        """As it is known now, `add` higher everywhere."""
        if self._points is None:
            self._points = tuple(sorted((x.mean, y.mean) for x, y in self._buckets.values()))
        return Knots(self._points, self._growth, self._offset, add)


def _bucket(x: float) -> int:
    """Every whole number up to 8 has its own, then some per octave."""
    whole = int(x + 0.5)
    if whole <= 8:
        return whole
    octave = whole.bit_length() - 1
    return 8 + (octave - 3) * _BUCKETS_PER_OCTAVE + (whole - (1 << octave)) * _BUCKETS_PER_OCTAVE // (1 << octave) + 1
