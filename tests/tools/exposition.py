"""What `/metrics` says, taken apart."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from prometheus_client.parser import text_string_to_metric_families

from services.telemetry.metrics import Metrics
from services.telemetry.metrics_exposition import Exposition, prometheus_name
from specdec.metric import Metric

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""Value by sample name and labels; an empty label is the same as none."""


def exposed(metrics: Metrics) -> str:
    """What `/metrics` shows of what the process counts itself."""
    text = Exposition(metrics).render()[0].decode()
    return "".join(line for line in text.splitlines(keepends=True) if "process_" not in line)


def samples(metrics: Metrics, kinds: Collection[str] = ("counter", "histogram", "gauge")) -> Samples:
    """Raises ValueError if a value is not a finite number."""
    return parsed(exposed(metrics), kinds)


def parsed(text: str, kinds: Collection[str] = ("counter", "histogram", "gauge")) -> Samples:
    """Raises ValueError if a value is not a finite number."""
    found = {
        (sample.name, tuple(sorted(label for label in sample.labels.items() if label[1]))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in kinds
        for sample in family.samples
    }
    wrong = {key: value for key, value in found.items() if not math.isfinite(value)}
    if wrong:
        raise ValueError(f"not finite: {wrong}")
    return found


def value(metrics: Metrics, metric: Metric, label: str = "") -> float:
    """Of a counter or gauge: of all its series together, or of those of which some label is `label`."""
    name = prometheus_name(metric)
    return sum(
        v for (n, labels), v in samples(metrics).items() if n == name and (not label or label in dict(labels).values())
    )


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
