"""The seam of counting: what is counted is defined beside the code that counts it, and `services.telemetry` shows it.

A metric's name here is its OpenTelemetry name; Prometheus shows it with `_` for `.`, its unit, and `_total` behind
counters. Every label has few values: none comes from a user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Protocol

Labels = tuple[str, ...]
"""One value for each of a metric's labels."""

Readings = Mapping[Labels, float]


class Kind(Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """values: of each label, those that are shown from the start, at 0; none: a series begins with its first value.
    buckets: upper bounds of a histogram. unit: "", "s" or "By"."""

    name: str
    meaning: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    kind: Kind = Kind.COUNTER
    buckets: tuple[float, ...] = ()

    @property
    def known(self) -> tuple[Labels, ...]:
        """The labels of all series that are shown from the start."""
        return tuple(product(*self.values)) if len(self.values) == len(self.labels) else ()


Addition = tuple[Metric, float, Labels]
"""By how much a counter rises."""


class Counters(Protocol):
    """Never blocks and never fails. Of one metric only one thread counts."""

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        """Raises a counter by `amount` >= 0. labels: one value for each of the metric's."""
        ...

    def add_each(self, additions: Iterable[Addition]) -> None:
        """As `add`, what belongs together in one call."""
        ...

    def observe(self, metric: Metric, value: float, *labels: str, traceparent: str = "") -> None:
        """Puts a value into a histogram. An empty label is left out. traceparent: of the request that it tells of."""
        ...


class NoCounters:
    """Implements `Counters` where nobody looks."""

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        pass

    def add_each(self, additions: Iterable[Addition]) -> None:
        pass

    def observe(self, metric: Metric, value: float, *labels: str, traceparent: str = "") -> None:
        pass


NO_COUNTERS = NoCounters()

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Bounds of histograms that count sequences or rows."""
