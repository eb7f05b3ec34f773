"""Running estimates of noisy times: means, curves and slopes that forget, and that one outlier does not move far."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import median

_CLIP = 4.0
"""An observation farther from the mean than so many mean deviations counts as being that far."""
_TRUSTED_AFTER = 5
_BUCKETS_PER_OCTAVE = 3
_SLOPE_RATE = 0.02


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
        error = self.clipped(value) - self.mean
        self.mean += self._rate * error
        self._deviation += self._rate * (abs(error) - self._deviation)

    def clipped(self, value: float) -> float:
        mean = self.mean
        limit = _CLIP * self._deviation + 0.02 * abs(mean)
        if value > mean + limit:
            return mean + limit
        return mean - limit if value < mean - limit else value

    def fade(self, keep: float) -> None:
        """Back towards 0, for what has not been observed for long."""
        if self.mean:
            self.mean *= keep
            self._first.clear()
            self.count = min(self.count, 1)


@dataclass(slots=True, unsafe_hash=True)
class Knots:
    """A curve through (x, y), x ascending: straight between them, and beyond them along the common slope. Without two
    of them y rises by the share `growth` when x + `offset` doubles. No knots: 0."""

    points: tuple[tuple[float, float], ...] = ()
    growth: float = 0.5
    offset: float = 0.0
    _slope: float | None = field(init=False, default=None, compare=False, repr=False)
    """Worked out when it is needed: mostly what is asked for lies between the knots."""

    def __call__(self, x: float) -> float:
        points = self.points
        if not points:
            return 0.0
        at = bisect_left(points, (x,))
        if 0 < at < len(points):
            (x0, y0), (x1, y1) = points[at - 1], points[at]
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        near_x, near_y = points[0] if at == 0 else points[-1]
        if x == near_x:
            return near_y
        if self._slope is None:
            self._slope = self._common_slope()
        return max(near_y + self._slope * (x - near_x), 0.1 * near_y)

    def _common_slope(self) -> float:
        count = len(self.points)
        if count < 2:
            x, y = self.points[0]
            return self.growth * y / (x + self.offset)
        mean_x = sum(x for x, _ in self.points) / count
        mean_y = sum(y for _, y in self.points) / count
        rise = sum((x - mean_x) * (y - mean_y) for x, y in self.points)
        return max(rise / sum((x - mean_x) ** 2 for x, _ in self.points), 0.0)


class _Bucket:
    """Means of what was seen near one x."""

    __slots__ = ("x", "y", "z")

    def __init__(self) -> None:
        self.x, self.y, self.z = RunningMean(), RunningMean(), RunningMean()


class Curve:
    """y over x >= 1, and how it rises with a third quantity z that drifts. Learned in buckets that grow with x; a
    bucket forgets only when it is visited, so that what was learned in one state of the system is still known when
    that state comes back.

    growth, offset: as in `Knots`. ridge: a deviation of z below this says little.
    """

    def __init__(self, growth: float, offset: float = 0.0, ridge: float = 1.0) -> None:
        self._growth = growth
        self._offset = offset
        self._ridge = ridge**2
        self._buckets: dict[int, _Bucket] = {}
        """In the order of x."""
        self._covariance = 0.0
        self._variance = 0.0

    @property
    def known(self) -> bool:
        return bool(self._buckets)

    def count(self, x: float) -> int:
        """Observations near `x`."""
        bucket = self._buckets.get(_number(x))
        return bucket.y.count if bucket else 0

    def observe(self, x: float, y: float, z: float = 0.0) -> None:
        bucket = self._buckets.get(_number(x))
        if bucket is None:
            bucket = self._buckets[_number(x)] = _Bucket()
            self._buckets = dict(sorted(self._buckets.items()))
        if bucket.y.count >= _TRUSTED_AFTER:
            dz, dy = z - bucket.z.mean, bucket.y.clipped(y) - bucket.y.mean
            self._covariance += _SLOPE_RATE * (dz * dy - self._covariance)
            self._variance += _SLOPE_RATE * (dz * dz - self._variance)
        bucket.x.observe(x)
        bucket.y.observe(y)
        bucket.z.observe(z)

    def knots(self, z: float = 0.0) -> Knots:
        """As it is known now, at `z`."""
        slope = max(self._covariance, 0.0) / (self._variance + self._ridge)
        buckets = self._buckets.values()
        points = [(b.x.mean, max(b.y.mean + slope * (z - b.z.mean), 0.2 * b.y.mean)) for b in buckets]
        return Knots(tuple(points), self._growth, self._offset)


def _number(x: float) -> int:
    """Every whole number up to 8 has its own, then some per octave."""
    whole = int(x + 0.5)
    if whole <= 8:
        return whole
    octave = whole.bit_length() - 1
    return 8 + (octave - 3) * _BUCKETS_PER_OCTAVE + (whole - (1 << octave)) * _BUCKETS_PER_OCTAVE // (1 << octave) + 1
