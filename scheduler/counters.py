"""What is counted, and the seam through which it is: the scheduler counts, `services.metrics` shows.

A metric's name here is its OpenTelemetry name; Prometheus shows it with `_` for `.`, its unit, and `_total` behind
counters. Every label has few values: none comes from a user.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MAX_POSITION = 32
"""Candidates at this depth and deeper share one value of the label `position`."""


class Kind(Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """values: of its only label, those that are shown from the start, at 0. buckets: upper bounds of a histogram."""

    name: str
    meaning: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    kind: Kind = Kind.COUNTER
    buckets: tuple[float, ...] = ()


class Counters(Protocol):
    """Never blocks and never fails."""

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        """Raises a counter by `amount` >= 0. labels: one value for each of the metric's."""
        ...

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Puts a value into a histogram. An empty label is left out."""
        ...


class NoCounters:
    """Implements `Counters` where nobody looks."""

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        pass

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        pass


NO_COUNTERS = NoCounters()

NUM_DRAFTS = Metric("outrider.spec_decode.num_drafts", "Verifies that had candidates.")
NUM_DRAFT_TOKENS = Metric("outrider.spec_decode.num_draft_tokens", "Candidates that were verified.")
NUM_ACCEPTED_TOKENS = Metric("outrider.spec_decode.num_accepted_tokens", "Candidates that became tokens.")
NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "outrider.spec_decode.num_accepted_tokens_per_pos",
    f"Accepted candidates by their depth in the tree, from 0; {MAX_POSITION}+ holds all deeper ones.",
    labels=("position",),
)
STALE_BLOCKS = Metric(
    "outrider.spec_decode.stale_blocks", "Blocks whose base was not on the log, dropped by scheduler or target."
)
AHEAD_HITS = Metric(
    "outrider.spec_decode.ahead_hits", "Blocks drafted before the block they extend was verified, on the way it took."
)
AHEAD_MISSES = Metric("outrider.spec_decode.ahead_misses", "Blocks drafted ahead on a way that the log did not take.")
FALLBACK = Metric(
    "outrider.spec_decode.fallback",
    "Times that a sequence left speculation, by reason.",
    labels=("reason",),
    values=("low_acceptance", "late", "failed"),
)
MODE = Metric(
    "outrider.spec_decode.mode",
    "Steps of targets that committed tokens: speculative with candidates, plain without.",
    labels=("mode",),
    values=("speculative", "plain"),
)
DRAFT_WAIT = Metric(
    "outrider.spec_decode.draft_wait", "Time between asking for a block and having it or giving it up.", "s"
)
FAILOVERS = Metric(
    "outrider.spec_decode.failovers",
    "Times that a sequence was opened again: its target was lost, drained or had no room.",
)
AUDIT_MISMATCHES = Metric(
    "outrider.spec_decode.audit_mismatches",
    "Audited answers that differ from plain decoding by more than a near-tie: 0 unless something is wrong.",
)
AUDITS = Metric(
    "outrider.audits",
    "Answers chosen for the audit, by what became of it: equal, near_tie or mismatch if compared; dropped (the queue "
    "was full), abandoned (the target got work) or failed if not.",
    labels=("outcome",),
    values=("equal", "near_tie", "mismatch", "dropped", "abandoned", "failed"),
)
GENERATION_TOKENS = Metric("outrider.generation_tokens", "Tokens that were streamed.")

_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Buckets as the GenAI semantic conventions advise:
# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "Duration of one choice of a request; error.type is what ended it early, `cancelled` if its client did.",
    "s",
    ("gen_ai.request.model", "error.type"),
    kind=Kind.HISTOGRAM,
    buckets=_DURATIONS,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "Time until the first tokens of a choice, waiting for room included.",
    "s",
    ("gen_ai.request.model",),
    kind=Kind.HISTOGRAM,
    buckets=_FIRST_TOKEN,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "Mean time per token behind the first tokens of a finished choice.",
    "s",
    ("gen_ai.request.model",),
    kind=Kind.HISTOGRAM,
    buckets=_PER_TOKEN,
)

METRICS = (
    NUM_DRAFTS,
    NUM_DRAFT_TOKENS,
    NUM_ACCEPTED_TOKENS,
    NUM_ACCEPTED_TOKENS_PER_POS,
    STALE_BLOCKS,
    AHEAD_HITS,
    AHEAD_MISSES,
    FALLBACK,
    MODE,
    DRAFT_WAIT,
    FAILOVERS,
    AUDIT_MISMATCHES,
    AUDITS,
    GENERATION_TOKENS,
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
)


def position_label(depth: int) -> str:
    return str(depth) if depth < MAX_POSITION else f"{MAX_POSITION}+"
