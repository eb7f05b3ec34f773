"""How the metrics of a process leave it: its own endpoint, a collector, and what is read on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from draft_worker import counters as draft
from scheduler import counters as scheduler
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_exposition import metrics_endpoint
from specdec.messages import Identity, Load
from specdec.metric import Metric, Readings
from target_worker import counters as target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.settings import ServingSettings, WorkerSettings


class Gauged(Protocol):
    """The part of `Scheduler` that is read."""

    def gauges(self) -> Mapping[Metric, Readings]: ...


def watch_scheduler(metrics: Metrics, gauged: Gauged, metadata_state: Callable[[], str]) -> None:
    for metric in scheduler.GAUGES:
        metrics.watch(metric, lambda metric=metric: gauged.gauges()[metric])  # type: ignore[misc]
    metrics.watch(scheduler.METADATA_UP, lambda: {(): float(metadata_state() == "connected")})


def watch_target(metrics: Metrics, load: Callable[[], Load]) -> None:
    """What a target worker counts in its load."""

    def blocks() -> Readings:
        now = load()
        return {("used",): now.kv_blocks_used, ("total",): now.kv_blocks_total}

    def usage() -> Readings:
        now = load()
        return {(): now.kv_blocks_used / now.kv_blocks_total} if now.kv_blocks_total else {}

    metrics.watch(target.COMMITTED_TOKENS, lambda: {(): load().tokens})
    metrics.watch(target.PREFIX_CACHE_HITS, lambda: {(): load().prefix_hit_tokens})
    metrics.watch(target.ENGINE_STALE_BLOCKS, lambda: {(): load().stale_blocks})
    metrics.watch(target.REFUSED_ITEMS, lambda: {(): load().refused_items})
    metrics.watch(target.OPEN_SEQUENCES, lambda: {(): load().sequences})
    metrics.watch(target.KV_BLOCKS, blocks)
    metrics.watch(target.KV_USAGE, usage)


def watch_draft(metrics: Metrics, load: Callable[[], Load], identity: Identity) -> None:
    """What a draft worker counts in its load."""
    label = (identity.drafter_label,)
    metrics.watch(draft.DRAFTED_TOKENS, lambda: {label: load().tokens})
    metrics.watch(draft.DRAFT_STALE, lambda: {label: load().stale_blocks})
    metrics.watch(draft.DRAFT_REFUSED_ITEMS, lambda: {label: load().refused_items})
    metrics.watch(draft.DRAFT_SEQUENCES, lambda: {label: load().sequences})


@contextmanager
def worker_metrics(metrics: Metrics, settings: WorkerSettings, role: str, worker_id: str) -> Iterator[None]:
    """Endpoint and export of a worker process, as its settings ask for them. Raises StartError."""
    with ExitStack() as stack:
        stack.enter_context(metrics_endpoint(metrics, settings.metrics_host, settings.metrics_port))
        stack.enter_context(exported(metrics, settings, role, worker_id))
        yield


@contextmanager
def exported(metrics: Metrics, settings: ServingSettings, role: str, instance: str) -> Iterator[None]:
    """Export to the collector that the settings name, if they do. OpenTelemetry is imported only then."""
    if not settings.otlp_endpoint:
        yield
        return
    from services.telemetry.metrics_otlp import otlp_metrics
    from services.telemetry.otlp import resource

    with otlp_metrics(metrics, settings.otlp_endpoint, resource(role, instance), settings.metrics_interval):
        yield
