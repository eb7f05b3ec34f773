"""What `/metrics` says, taken apart."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from scheduler.counters import Metric
from services.metrics import Metrics, prometheus_name

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""Value by sample name and labels; an empty label is the same as none."""


def samples(metrics: Metrics) -> Samples:
    """Raises ValueError if a value is not a finite number."""
    found = {
        (sample.name, tuple(sorted(label for label in sample.labels.items() if label[1]))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    wrong = {key: value for key, value in found.items() if not math.isfinite(value)}
    if wrong:
        raise ValueError(f"not finite: {wrong}")
    return found


def value(metrics: Metrics, metric: Metric, label: str = "") -> float:
    """Of a counter; `label` is that of its only label. 0 where it is not shown."""
    labels = ((metric.labels[0].replace(".", "_"), label),) if label else ()
    return samples(metrics).get((prometheus_name(metric), labels), 0.0)


def by_label(metrics: Metrics, metric: Metric) -> dict[str, float]:
    """Values above 0 of a metric with one label."""
    name = prometheus_name(metric)
    return {labels[0][1]: v for (n, labels), v in samples(metrics).items() if n == name and v}


def count(metrics: Metrics, metric: Metric, **labels: str) -> float:
    """How many values a histogram holds whose labels are `labels`, among others."""
    name = prometheus_name(metric) + "_count"
    return sum(
        v
        for (n, have), v in samples(metrics).items()
        if n == name and all(dict(have).get(k, "") == wanted for k, wanted in labels.items())
    )
