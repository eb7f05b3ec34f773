"""Where a process counts: plain numbers, put together only when somebody looks.

Counting is on the path of every token, so it costs a dictionary look-up and no call into a library;
`metrics_exposition` and `metrics_otlp` turn `collect()` into what Prometheus and OTLP want.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Union

from specdec.metric import Addition, Kind, Labels, Metric, Readings

MAX_SERIES = 200
"""Of one metric. Series beyond share the label value `other`: no fault can fill the memory of whoever scrapes."""
OTHER = "other"

Read = Callable[[], Readings]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One value of a histogram whose trace was recorded. at: seconds since the epoch."""

    value: float
    at: float
    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Distribution:
    """counts: values per bucket, the last one above all bounds; exemplars: the latest of each bucket."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    exemplars: tuple[Exemplar | None, ...]


Value = Union[float, Distribution]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with what was counted so far."""

    metric: Metric
    series: tuple[tuple[Labels, Value], ...]


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_exemplars", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, exemplar: Exemplar | None) -> None:
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._total += value
        if exemplar is not None:
            self._exemplars[bucket] = exemplar

    def read(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total, tuple(self._exemplars))


class Metrics:
    """Implements `specdec.metric.Counters`. Counters whose labels are known beforehand are there from the start."""

    def __init__(self, definitions: Iterable[Metric]) -> None:
        self.definitions = tuple(definitions)
        self.started_at = time.time()
        self._counts: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        self._readers: dict[str, Read] = {}
        for metric in self.definitions:
            if metric.kind is Kind.COUNTER:
                self._counts[metric.name] = dict.fromkeys(metric.known, 0.0)
            elif metric.kind is Kind.HISTOGRAM:
                self._histograms[metric.name] = {}

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        series = self._counts[metric.name]
        try:
            series[labels] += amount
        except KeyError:
            labels = _admitted(metric, labels, len(series))
            series[labels] = series.get(labels, 0.0) + amount

    def add_each(self, additions: Iterable[Addition]) -> None:
        counts = self._counts
        for metric, amount, labels in additions:
            try:
                counts[metric.name][labels] += amount
            except KeyError:
                self.add(metric, amount, *labels)

    def observe(self, metric: Metric, value: float, *labels: str, traceparent: str = "") -> None:
        series = self._histograms[metric.name]
        histogram = series.get(labels)
        if histogram is None:
            labels = _admitted(metric, labels, len(series))
            histogram = series.setdefault(labels, _Histogram(metric.buckets))
        histogram.observe(value, _exemplar(value, traceparent) if traceparent else None)

    def watch(self, metric: Metric, read: Read) -> None:
        """`read` is asked whenever somebody looks: for gauges, and for counters that are kept elsewhere."""
        self._readers[metric.name] = read

    def collect(self) -> list[Family]:
        """All that was counted so far. May be called by any thread."""
        return [Family(metric, tuple(self._series(metric))) for metric in self.definitions]

    def _series(self, metric: Metric) -> Iterable[tuple[Labels, Value]]:
        read = self._readers.get(metric.name)
        if read is not None:
            found = {**dict.fromkeys(metric.known, 0.0), **read()}
            return list(found.items())[:MAX_SERIES]
        if metric.kind is Kind.HISTOGRAM:
            return [(labels, histogram.read()) for labels, histogram in list(self._histograms[metric.name].items())]
        return list(self._counts.get(metric.name, {}).items())


def _admitted(metric: Metric, labels: Labels, series: int) -> Labels:
    """The labels of a series that is new, or those of the one that all further ones share. Raises ValueError."""
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, given were {labels}")
    return labels if series < MAX_SERIES else (OTHER,) * len(labels)


def _exemplar(value: float, traceparent: str) -> Exemplar | None:
    match = _TRACEPARENT.match(traceparent)
    if match is None or not int(match[3], 16) & _SAMPLED:
        return None
    return Exemplar(value, time.time(), match[1], match[2])
