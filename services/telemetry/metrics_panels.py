"""What the dashboards show. A query names its metrics by their definitions, so that a metric that is renamed or dropped
cannot stay behind in one; `metrics_dashboards` writes them as Grafana reads them."""

from __future__ import annotations

from dataclasses import dataclass

from draft_worker import counters as draft
from scheduler import counters as scheduler
from services.telemetry.metrics_exposition import prometheus_name
from specdec.metric import Metric
from target_worker import counters as target

NAMESPACE = 'namespace=~"$namespace"'
"""In every query; where Prometheus adds no such label, `All` matches its absence."""


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """unit: Grafana's name of it."""

    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[Panel, ...]


def series(metric: Metric, more: str = "", part: str = "") -> str:
    """A selector. part: of a histogram, `sum`, `count` or `bucket`."""
    name = prometheus_name(metric) + (f"_{part}" if part else "")
    return f"{name}{{{NAMESPACE}{', ' + more if more else ''}}}"


def rate(metric: Metric, more: str = "", by: str = "", part: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({series(metric, more, part)}[$__rate_interval]))"


def quantile(share: float, metric: Metric, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(metric, by=labels, part='bucket')})"


def mean(metric: Metric, by: str = "") -> str:
    return f"{rate(metric, by=by, part='sum')} / {rate(metric, by=by, part='count')}"


def now(metric: Metric, more: str = "", by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({series(metric, more)})"


def quantiles(metric: Metric) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, metric), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def one(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr, legend),)


_ENDED = scheduler.REQUEST_DURATION

OVERVIEW = Dashboard(
    "outrider-overview",
    "Outrider / Requests",
    (
        Panel("Tokens per second", "What users get.", "short", one(rate(scheduler.GENERATION_TOKENS), "tokens")),
        Panel(
            "Requests per second",
            "Choices that ended, by what ended them early; nothing: they ended well.",
            "reqps",
            one(rate(_ENDED, by="error_type", part="count"), "{{error_type}}"),
        ),
        Panel(
            "Ended well",
            "By reason.",
            "reqps",
            one(rate(scheduler.REQUEST_SUCCESS, by="finished_reason"), "{{finished_reason}}"),
        ),
        Panel(
            "Ended early",
            "By what; `cancelled`: the client went.",
            "reqps",
            one(rate(scheduler.REQUEST_ERRORS, by="error_type"), "{{error_type}}"),
        ),
        Panel("Time to first token", "Waiting included.", "s", quantiles(scheduler.TIME_TO_FIRST_TOKEN)),
        Panel(
            "Time per output token",
            "Mean of each answer, behind its first tokens.",
            "s",
            quantiles(scheduler.TIME_PER_OUTPUT_TOKEN),
        ),
        Panel("Request duration", "From arrival to end.", "s", quantiles(_ENDED)),
        Panel(
            "Running and waiting",
            "Waiting: for a target with room.",
            "short",
            (
                Query(now(scheduler.REQUESTS_RUNNING), "running"),
                Query(now(scheduler.REQUESTS_WAITING), "waiting"),
            ),
        ),
        Panel("Time in the queue", "Until a target took it.", "s", quantiles(scheduler.QUEUE_TIME)),
        Panel("Prompt tokens per second", "Opened on targets.", "short", one(rate(scheduler.PROMPT_TOKENS), "tokens")),
        Panel(
            "Workers",
            "By role and state.",
            "short",
            one(now(scheduler.WORKERS, by="role, state"), "{{role}} {{state}}"),
        ),
        Panel("Failovers", "Sequences opened again elsewhere.", "ops", one(rate(scheduler.FAILOVERS), "failovers")),
        Panel(
            "Audit",
            "Answers decoded again without speculation, by outcome. Anything under `mismatch` is a fault.",
            "ops",
            one(rate(scheduler.AUDITS, by="outcome"), "{{outcome}}"),
        ),
        Panel("Audit mismatches", "Since the start.", "short", one(now(scheduler.AUDIT_MISMATCHES), "mismatches")),
        Panel("Redis", "1 while it takes records.", "short", one(f"min ({series(scheduler.METADATA_UP)})", "up")),
    ),
)

SPECULATION = Dashboard(
    "outrider-speculation",
    "Outrider / Speculation",
    (
        Panel(
            "Acceptance rate",
            "Accepted candidates of those that were verified, by drafter.",
            "percentunit",
            one(
                f"{rate(scheduler.NUM_ACCEPTED_TOKENS, by='drafter')} / "
                f"{rate(scheduler.NUM_DRAFT_TOKENS, by='drafter')}",
                "{{drafter}}",
            ),
        ),
        Panel(
            "Tokens per verify",
            "Mean acceptance length: accepted candidates and one token of the target's own.",
            "short",
            one(
                f"1 + {rate(scheduler.NUM_ACCEPTED_TOKENS, by='drafter')} / {rate(scheduler.NUM_DRAFTS, by='drafter')}",
                "{{drafter}}",
            ),
        ),
        Panel(
            "Accepted by position",
            "Share of verifies that accepted a candidate at this depth.",
            "percentunit",
            one(
                f"{rate(scheduler.NUM_ACCEPTED_TOKENS_PER_POS, by='position')} / on () group_left "
                f"{rate(scheduler.NUM_DRAFTS)}",
                "{{position}}",
            ),
        ),
        Panel(
            "Steps by mode",
            "Speculative: with candidates.",
            "ops",
            one(rate(scheduler.MODE, by="mode"), "{{mode}}"),
        ),
        Panel("Sequences by mode", "At this moment.", "short", one(now(scheduler.SEQUENCES, by="mode"), "{{mode}}")),
        Panel(
            "Decisions",
            "Of the policy, for sequences with a drafter.",
            "ops",
            one(rate(scheduler.DECISIONS, by="decision"), "{{decision}}"),
        ),
        Panel("Draft length", "Mean of what was asked for.", "short", one(mean(scheduler.DRAFT_LENGTH), "candidates")),
        Panel("Window", "Mean of what was asked for.", "short", one(mean(scheduler.WINDOW), "blocks")),
        Panel(
            "Draft wait",
            "How long a sequence waits for the block of one verify.",
            "s",
            one(f"{rate(scheduler.DRAFT_WAIT)} / {rate(scheduler.NUM_DRAFTS)}", "per verify"),
        ),
        Panel(
            "Blocks drafted ahead",
            "Hits: the log went the way they were drafted on.",
            "ops",
            (
                Query(rate(scheduler.AHEAD_HITS), "hits"),
                Query(rate(scheduler.AHEAD_MISSES), "misses"),
                Query(rate(scheduler.FAN_OUT_HITS), "fan-out hits"),
                Query(rate(scheduler.FAN_OUT_MISSES), "fan-out misses"),
            ),
        ),
        Panel("Stale blocks", "Dropped by scheduler or target.", "ops", one(rate(scheduler.STALE_BLOCKS), "stale")),
        Panel(
            "Left speculation",
            "By reason.",
            "ops",
            one(rate(scheduler.FALLBACK, by="reason"), "{{reason}}"),
        ),
    ),
)

WORKERS = Dashboard(
    "outrider-workers",
    "Outrider / Workers and wire",
    (
        Panel(
            "Target busy",
            "Share of the time in a forward, and of that in which one was held back for blocks about to come.",
            "percentunit",
            (
                Query(rate(target.STEP_TIME, by="instance", part="sum"), "{{instance}}"),
                Query(rate(target.HOLD_TIME, by="instance", part="sum"), "{{instance}} held back"),
            ),
        ),
        Panel("Step time", "One packed forward.", "s", quantiles(target.STEP_TIME)),
        Panel(
            "Batch size", "Sequences per forward.", "short", one(mean(target.BATCH_SIZE, "instance"), "{{instance}}")
        ),
        Panel(
            "Packed tokens",
            "Rows per forward.",
            "short",
            one(mean(target.ITERATION_TOKENS, "instance"), "{{instance}}"),
        ),
        Panel("Rows", "Of forwards, by kind.", "ops", one(rate(target.ROWS, by="kind"), "{{kind}}")),
        Panel(
            "Committed tokens",
            "By target; those that were dropped behind a stop text included.",
            "ops",
            one(rate(target.COMMITTED_TOKENS, by="instance"), "{{instance}}"),
        ),
        Panel(
            "KV in use",
            "Share of blocks.",
            "percentunit",
            one(f"max by (instance) ({series(target.KV_USAGE)})", "{{instance}}"),
        ),
        Panel(
            "KV blocks",
            "In use, and all there are.",
            "short",
            one(now(target.KV_BLOCKS, by="state"), "{{state}}"),
        ),
        Panel(
            "Prefix hits",
            "Share of opened tokens whose KV was found.",
            "percentunit",
            one(f"{rate(target.PREFIX_CACHE_HITS)} / {rate(target.PREFIX_CACHE_QUERIES)}", "hits"),
        ),
        Panel("Open sequences", "By target.", "short", one(now(target.OPEN_SEQUENCES, by="instance"), "{{instance}}")),
        Panel(
            "Trouble at targets",
            "KV taken back, failed sequences, stale blocks, refused messages.",
            "ops",
            (
                Query(rate(target.PREEMPTIONS), "preemptions"),
                Query(rate(target.FAILED_SEQUENCES), "failed sequences"),
                Query(rate(target.ENGINE_STALE_BLOCKS), "stale blocks"),
                Query(rate(target.REFUSED_ITEMS), "refused messages"),
            ),
        ),
        Panel(
            "Drafter busy",
            "Share of the time in drafting.",
            "percentunit",
            one(rate(draft.DRAFT_TIME, by="drafter, instance", part="sum"), "{{drafter}} {{instance}}"),
        ),
        Panel(
            "Drafting time",
            "One batch of blocks.",
            "s",
            one(quantile(0.95, draft.DRAFT_TIME, "drafter"), "{{drafter}}"),
        ),
        Panel(
            "Drafter queue",
            "From due to drafting.",
            "s",
            one(quantile(0.95, draft.QUEUE_TIME, "drafter"), "{{drafter}}"),
        ),
        Panel(
            "Drafter batch", "Sequences together.", "short", one(mean(draft.DRAFT_BATCH_SIZE, "drafter"), "{{drafter}}")
        ),
        Panel("Drafted tokens", "Per second.", "ops", one(rate(draft.DRAFTED_TOKENS, by="drafter"), "{{drafter}}")),
        Panel("Blocks", "By outcome.", "ops", one(rate(draft.DRAFTED_BLOCKS, by="outcome"), "{{outcome}}")),
        Panel(
            "Trouble at drafters",
            "Stale and refused messages.",
            "ops",
            (Query(rate(draft.DRAFT_STALE), "stale"), Query(rate(draft.DRAFT_REFUSED_ITEMS), "refused")),
        ),
        Panel(
            "Sequences at drafters",
            "Open there.",
            "short",
            one(now(draft.DRAFT_SEQUENCES, by="drafter"), "{{drafter}}"),
        ),
        Panel(
            "Wire",
            "Bytes between scheduler and workers.",
            "Bps",
            one(rate(scheduler.WIRE_BYTES, by="role, direction"), "{{role}} {{direction}}"),
        ),
        Panel(
            "Bytes per token",
            "What a streamed token costs on the wire.",
            "bytes",
            one(f"{rate(scheduler.WIRE_BYTES)} / {rate(scheduler.GENERATION_TOKENS)}", "bytes"),
        ),
        Panel(
            "Messages",
            "Each holds what all sequences had to say at once.",
            "ops",
            one(rate(scheduler.WIRE_MESSAGES, by="role, direction"), "{{role}} {{direction}}"),
        ),
        Panel(
            "Link to drafters",
            "Round trip beside drafting.",
            "s",
            one(f"max by (worker) ({series(scheduler.DRAFT_LINK_TIME)})", "{{worker}}"),
        ),
        Panel("Lost streams", "To workers.", "ops", one(rate(scheduler.LOST_STREAMS, by="role"), "{{role}}")),
    ),
)

DASHBOARDS = (OVERVIEW, SPECULATION, WORKERS)
