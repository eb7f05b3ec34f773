"""A process's metrics on their way to an OpenTelemetry collector, on a thread of its own.

The collector may be slow, broken or absent: then samples are dropped, and counting goes on. Nothing is queued, since
the next export tells all that was counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar as OtlpExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from services.telemetry.metrics import Distribution, Exemplar, Family, Metrics, Value
from services.telemetry.otlp import channel_options, quieten
from specdec.metric import Kind, Labels, Metric

log = logging.getLogger(__name__)

SCOPE = "outrider"
TIMEOUT = 5.0
"""Seconds that one export may take, the last one included."""
_NANO = 1_000_000_000
_CUMULATIVE = AggregationTemporality.CUMULATIVE


class Exporter(Protocol):
    """What of `OTLPMetricExporter` is used."""

    def export(self, metrics_data: MetricsData, timeout_millis: float = ...) -> MetricExportResult: ...

    def shutdown(self, timeout_millis: float = ...) -> None: ...


@contextmanager
def otlp_metrics(metrics: Metrics, endpoint: str, resource: Resource, interval: float) -> Iterator[None]:
    """Exports to `endpoint` (a URL; http:// is without TLS) meanwhile, every `interval` seconds, and at the end once
    more."""
    quieten()
    exporter = OTLPMetricExporter(endpoint, timeout=TIMEOUT, channel_options=channel_options(endpoint))
    export = Export(metrics, exporter, resource, interval)
    export.start()
    try:
        yield
    finally:
        export.close()


class Export:
    def __init__(self, metrics: Metrics, exporter: Exporter, resource: Resource, interval: float) -> None:
        self._metrics = metrics
        self._exporter = exporter
        self._resource = resource
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._failing = False

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Exports what was counted last. Waits at most TIMEOUT: the process must end whatever the collector does."""
        self._ended.set()
        self._thread.join(TIMEOUT)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self._export()
        self._export()
        self._exporter.shutdown()

    def _export(self) -> None:
        try:
            result = self._exporter.export(data(self._metrics, self._resource))
        except Exception:
            log.debug("metrics could not be exported", exc_info=True)
            result = MetricExportResult.FAILURE
        failing = result is not MetricExportResult.SUCCESS
        if failing and not self._failing:
            log.warning("metrics cannot be sent to the OpenTelemetry collector; said once until it takes them again")
        self._failing = failing


def data(metrics: Metrics, resource: Resource) -> MetricsData:
    """All that was counted so far."""
    start, now = round(metrics.started_at * _NANO), time.time_ns()
    converted = [_converted(family, start, now) for family in metrics.collect() if family.series]
    scope = ScopeMetrics(InstrumentationScope(SCOPE), converted, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _converted(family: Family, start: int, now: int) -> OtlpMetric:
    metric = family.metric
    if metric.kind is Kind.HISTOGRAM:
        points = [
            _distribution(metric, labels, read, start, now)
            for labels, read in family.series
            if isinstance(read, Distribution)
        ]
        return OtlpMetric(metric.name, metric.meaning, metric.unit, Histogram(points, _CUMULATIVE))
    numbers = [_number(metric, labels, read, start, now) for labels, read in family.series]
    if metric.kind is Kind.GAUGE:
        return OtlpMetric(metric.name, metric.meaning, metric.unit, Gauge(numbers))
    return OtlpMetric(metric.name, metric.meaning, metric.unit, Sum(numbers, _CUMULATIVE, is_monotonic=True))


def _number(metric: Metric, labels: Labels, read: Value, start: int, now: int) -> NumberDataPoint:
    value = 0.0 if isinstance(read, Distribution) else float(read)
    return NumberDataPoint(_attributes(metric, labels), start, now, value)


def _distribution(metric: Metric, labels: Labels, read: Distribution, start: int, now: int) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=_attributes(metric, labels),
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=sum(read.counts),
        sum=read.total,
        bucket_counts=read.counts,
        explicit_bounds=read.bounds,
        min=None,  # type: ignore[arg-type]  # optional on the wire, and not kept
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(exemplar) for exemplar in read.exemplars if exemplar is not None],
    )


def _exemplar(exemplar: Exemplar) -> OtlpExemplar:
    return OtlpExemplar(
        filtered_attributes={},
        value=exemplar.value,
        time_unix_nano=round(exemplar.at * _NANO),
        span_id=int(exemplar.span_id, 16),
        trace_id=int(exemplar.trace_id, 16),
    )


def _attributes(metric: Metric, labels: Labels) -> dict[str, str]:
    """An empty label says nothing."""
    return {name: value for name, value in zip(metric.labels, labels, strict=True) if value}
