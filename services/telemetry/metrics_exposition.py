"""A process's metrics as Prometheus text, and the endpoint of a process that has no other HTTP server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Exemplar as PrometheusExemplar
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.start_error import StartError
from services.telemetry.metrics import Distribution, Exemplar, Family, Metrics
from specdec.metric import Kind, Metric

log = logging.getLogger(__name__)

_UNITS = {"s": "_seconds", "By": "_bytes", "": ""}


def family_name(metric: Metric) -> str:
    """Without the `_total` of counters."""
    suffix = _UNITS[metric.unit]
    name = metric.name.replace(".", "_")
    return name if name.endswith(suffix) else name + suffix


def prometheus_name(metric: Metric) -> str:
    """As `/metrics` shows it."""
    return family_name(metric) + ("_total" if metric.kind is Kind.COUNTER else "")


def prometheus_labels(metric: Metric) -> list[str]:
    return [label.replace(".", "_") for label in metric.labels]


class Exposition(Collector):
    """Renders `metrics`, and what the operating system knows of this process (CPU, memory, open files)."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[PrometheusMetric]:
        for family in self._metrics.collect():
            yield _converted(family)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Text and its content type. accept: the header of who asks; only OpenMetrics has exemplars."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


@contextmanager
def metrics_endpoint(metrics: Metrics, host: str, port: int | None) -> Iterator[str]:
    """Serves `metrics` at `/metrics` on threads of its own meanwhile; yields the URL, "" without a port. Port 0 is a
    free one. Raises StartError if it cannot listen."""
    if port is None:
        yield ""
        return
    try:
        server, thread = start_http_server(port, host, Exposition(metrics).registry)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise StartError(f"cannot serve metrics at {host}:{port} ({reason}): choose another --metrics-port") from error
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    log.info("metrics at %s", url)
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _converted(family: Family) -> PrometheusMetric:
    metric = family.metric
    name, labels = family_name(metric), prometheus_labels(metric)
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.meaning, labels=labels)
        for values, read in family.series:
            if isinstance(read, Distribution):
                histogram.add_metric(list(values), _buckets(read), read.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    numbers = kind(name, metric.meaning, labels=labels)
    for values, read in family.series:
        if not isinstance(read, Distribution):
            numbers.add_metric(list(values), read)
    return numbers


def _buckets(read: Distribution) -> list[tuple[str, float] | tuple[str, float, PrometheusExemplar]]:
    """Cumulative, as Prometheus has them."""
    bounds = [*map(floatToGoString, read.bounds), "+Inf"]
    return [
        (bound, count) if exemplar is None else (bound, count, _exemplar(exemplar))
        for bound, count, exemplar in zip(bounds, accumulate(read.counts), read.exemplars, strict=True)
    ]


def _exemplar(exemplar: Exemplar) -> PrometheusExemplar:
    labels = {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
    return PrometheusExemplar(labels, exemplar.value, exemplar.at)
