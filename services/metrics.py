"""What each role's process counts, and the page that lists it: `python -m services.metrics > docs/metrics.md`."""

from __future__ import annotations

from functools import cache

from draft_worker import counters as draft
from outrider.version import __version__
from scheduler import counters as scheduler
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_exposition import Exposition, prometheus_labels, prometheus_name
from specdec.metric import Kind, Metric
from target_worker import counters as target

BUILD_INFO = Metric(
    "outrider.build_info", "Always 1; tells role and version.", labels=("role", "version"), kind=Kind.GAUGE
)
ROLES = {"scheduler": scheduler.METRICS, "target": target.METRICS, "draft": draft.METRICS}


def role_metrics(role: str) -> Metrics:
    """Those of a process of `role`: scheduler, target or draft."""
    metrics = Metrics((*ROLES[role], BUILD_INFO))
    metrics.watch(BUILD_INFO, lambda: {(role, __version__): 1.0})
    return metrics


@cache
def process_metrics() -> Metrics:
    """Those of this scheduler process."""
    return role_metrics("scheduler")


@cache
def _process_exposition() -> Exposition:
    return Exposition(process_metrics())


def render(accept: str = "") -> tuple[bytes, str]:
    """`process_metrics` for `/metrics`, and the content type. accept: the header of whoever asks."""
    return _process_exposition().render(accept)


def documentation() -> str:
    """docs/metrics.md."""
    tables = {role: "\n".join(map(_row, metrics)) for role, metrics in ROLES.items()}
    return _PAGE.format(common=_row(BUILD_INFO), **tables)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in prometheus_labels(metric)) or "-"
    return f"| `{prometheus_name(metric)}` | {metric.kind.value} | {labels} | {metric.meaning} |"


_PAGE = """\
# Metrics

Every process counts for itself. The scheduler shows its metrics at `/metrics` of its HTTP port; a worker does at a port
of its own if it has a `metrics_port` (none by default; `metrics_host` is 127.0.0.1). With `otlp_endpoint` all of them
also go to an OpenTelemetry collector, every `metrics_interval` seconds, under the names with dots
(`outrider.spec_decode.num_drafts`). The tables are made from `counters.py` of each role:
`python -m services.metrics > docs/metrics.md`.

Dashboards for Grafana and rules for Prometheus are in
[k8s/components/monitoring](../k8s/components/monitoring); [runbook.md](runbook.md) tells what to do about each alert.

## Scheduler

| name | kind | labels | meaning |
|---|---|---|---|
{scheduler}

## Target worker

| name | kind | labels | meaning |
|---|---|---|---|
{target}

## Draft worker

| name | kind | labels | meaning |
|---|---|---|---|
{draft}

## Every process

| name | kind | labels | meaning |
|---|---|---|---|
{common}

Beside it `process_*`: CPU seconds, memory and open files, as every Prometheus client shows them (not sent to OTLP).

## How to read them

- Counters only grow, and start at 0 with the process. Replays of the audit move `outrider_audits_total` and
  `outrider_spec_decode_audit_mismatches_total` in the scheduler, and the engine's metrics.
- Acceptance rate: `sum(rate(outrider_spec_decode_num_accepted_tokens_total[5m])) /
  sum(rate(outrider_spec_decode_num_draft_tokens_total[5m]))`. Nothing drafted is 0/0: no value.
- Of a request with `n` choices each choice is counted.
- A cut by a stop text counts as verified what the target verified, and as accepted what was kept.
- How busy a worker is: `rate(outrider_engine_step_time_seconds_sum[1m])` of a target,
  `rate(outrider_draft_draft_time_seconds_sum[1m])` of a drafter, as a share of 1.
- Labels have few values and none comes from a user. A metric shows at most 200 series; what comes then has `other` for
  every label.
- Histograms of requests have exemplars (the trace of a request that was sampled) over OTLP, and on the endpoint for
  whoever asks for OpenMetrics.
"""

if __name__ == "__main__":
    print(documentation(), end="")
