"""The scheduler's counters as OpenTelemetry instruments, shown as Prometheus text."""

from __future__ import annotations

from functools import cache

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Counter, Histogram
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

from scheduler.counters import METRICS, Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `render` returns."""


class Metrics:
    """Implements `scheduler.counters.Counters`.

    Counters without labels, and those values of labels that are known beforehand, are there from the start, at 0.
    Whoever adds a reader: never call `force_flush()`, which fails where a Prometheus reader is attached.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
        meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("outrider")
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            if metric.kind is Kind.COUNTER:
                self._counters[metric.name] = meter.create_counter(metric.name, metric.unit, metric.meaning)
                self._show_from_the_start(metric)
            else:
                self._histograms[metric.name] = meter.create_histogram(
                    metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
                )

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        self._counters[metric.name].add(amount, dict(zip(metric.labels, labels, strict=True)))

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        given = zip(metric.labels, labels, strict=True)
        self._histograms[metric.name].record(value, {name: label for name, label in given if label})

    def render(self) -> bytes:
        """All that was counted so far, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _show_from_the_start(self, metric: Metric) -> None:
        if not metric.labels:
            self.add(metric, 0)
        for value in metric.values:
            self.add(metric, 0, value)


@cache
def process_metrics() -> Metrics:
    """Those of this process."""
    return Metrics()


def render() -> bytes:
    """The metrics of this process in Prometheus' text format, for `/metrics`."""
    return process_metrics().render()


def prometheus_name(metric: Metric) -> str:
    """As `/metrics` shows it."""
    name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
    return name + "_total" if metric.kind is Kind.COUNTER else name


def documentation() -> str:
    """docs/metrics.md."""
    rows = [
        f"| `{prometheus_name(metric)}` | {metric.kind.value} | {_labels(metric)} | {metric.meaning} |"
        for metric in METRICS
    ]
    return _PAGE.format(rows="\n".join(rows))


def _labels(metric: Metric) -> str:
    return ", ".join("`" + label.replace(".", "_") + "`" for label in metric.labels) or "-"


_PAGE = """\
# Metrics

The scheduler process counts, and its HTTP server shows the counts as Prometheus text at `/metrics`. The table is made
from `scheduler/counters.py`: `python -m services.metrics > docs/metrics.md`.

| name | kind | labels | meaning |
|---|---|---|---|
{rows}

- Counters only grow, and start at 0 with the process. Replays of the audit move `outrider_audits_total` and
  `outrider_spec_decode_audit_mismatches_total` alone.
- Acceptance rate: `rate(outrider_spec_decode_num_accepted_tokens_total[5m]) /
  rate(outrider_spec_decode_num_draft_tokens_total[5m])`. Nothing drafted is 0/0, which Prometheus shows as no value.
- Of a request with `n` choices each choice is counted.
- A cut by a stop text counts as verified what the target verified, and as accepted what was kept.
"""

if __name__ == "__main__":
    print(documentation(), end="")
