"""What the scheduler process counts, and what can be read of it whenever somebody looks."""

from __future__ import annotations

from scheduler.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SequenceFailed,
    Unavailable,
)
from specdec.commit import FinishReason
from specdec.metric import NO_COUNTERS, Counters, Kind, Metric

__all__ = ["METRICS", "NO_COUNTERS", "Counters", "Kind", "Metric", "position_labels"]

ERRORS = (DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded, SequenceFailed, Unavailable)
MAX_POSITION = 32
"""Candidates at this depth and deeper share one value of the label `position`."""

NUM_DRAFTS = Metric("outrider.spec_decode.num_drafts", "Verifies that had candidates.", labels=("drafter",))
NUM_DRAFT_TOKENS = Metric(
    "outrider.spec_decode.num_draft_tokens", "Candidates that were verified.", labels=("drafter",)
)
NUM_ACCEPTED_TOKENS = Metric(
    "outrider.spec_decode.num_accepted_tokens", "Candidates that became tokens.", labels=("drafter",)
)
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
FAN_OUT_HITS = Metric(
    "outrider.spec_decode.fan_out_hits",
    "Blocks drafted for a token that was not the drafter's likeliest, and that the target committed.",
)
FAN_OUT_MISSES = Metric(
    "outrider.spec_decode.fan_out_misses",
    "Blocks drafted for a token that was not the drafter's likeliest, and that the target did not commit.",
)
DECISIONS = Metric(
    "outrider.spec_decode.decisions",
    "Decisions of the policy for a sequence with a drafter: draft, off (decode plainly), probe (draft to learn from).",
    labels=("decision",),
    values=(("draft", "off", "probe"),),
)
DRAFT_LENGTH = Metric(
    "outrider.spec_decode.draft_length",
    "Candidates on the longest path that the policy asked for when it decided to draft.",
    kind=Kind.HISTOGRAM,
    buckets=(1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64),
)
WINDOW = Metric(
    "outrider.spec_decode.window",
    "Blocks in flight that the policy asked for when it decided to draft; 1 is stop and wait.",
    kind=Kind.HISTOGRAM,
    buckets=(1, 2, 3, 4, 5, 6, 7, 8),
)
FALLBACK = Metric(
    "outrider.spec_decode.fallback",
    "Times that a sequence left speculation, by reason.",
    labels=("reason",),
    values=(("low_acceptance", "late", "failed"),),
)
MODE = Metric(
    "outrider.spec_decode.mode",
    "Steps of targets that committed tokens: speculative with candidates, plain without.",
    labels=("mode",),
    values=(("speculative", "plain"),),
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
    values=(("equal", "near_tie", "mismatch", "dropped", "abandoned", "failed"),),
)
PROMPT_TOKENS = Metric("outrider.prompt_tokens", "Tokens of prompts that were opened on a target.")
GENERATION_TOKENS = Metric("outrider.generation_tokens", "Tokens that were streamed.")
REQUEST_SUCCESS = Metric(
    "outrider.request_success",
    "Choices of requests that ended well, by reason.",
    labels=("finished_reason",),
    values=(tuple(reason.value for reason in FinishReason),),
)

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

WIRE_BYTES = Metric(
    "outrider.wire.bytes",
    "Bytes of messages on the streams between scheduler and workers, by role of the worker, seen from the scheduler.",
    "By",
    ("role", "direction"),
    (("target", "draft"), ("sent", "received")),
)
WIRE_MESSAGES = Metric(
    "outrider.wire.messages",
    "Messages on these streams; each holds what all sequences had to say at once.",
    labels=("role", "direction"),
    values=(("target", "draft"), ("sent", "received")),
)
LOST_STREAMS = Metric(
    "outrider.wire.lost_streams",
    "Streams to workers that broke, by role of the worker.",
    labels=("role",),
    values=(("target", "draft"),),
)
DRAFT_LINK_TIME = Metric(
    "outrider.wire.draft_link_time",
    "Recent mean time from asking a draft worker for a block to having it, besides drafting it; unknown while all "
    "blocks are drafted ahead.",
    "s",
    ("worker",),
    kind=Kind.GAUGE,
)
REQUEST_ERRORS = Metric(
    "outrider.request_errors",
    "Choices of requests that something ended early, by what; `cancelled` if the client did.",
    labels=("error_type",),
    values=((*(kind.__name__ for kind in ERRORS), "cancelled"),),
)
QUEUE_TIME = Metric(
    "outrider.request_queue_time",
    "Time that a choice waited for a target with room.",
    "s",
    ("gen_ai.request.model",),
    kind=Kind.HISTOGRAM,
    buckets=_FIRST_TOKEN,
)
REQUESTS_RUNNING = Metric(
    "outrider.num_requests_running", "Choices of requests that are open on a target.", kind=Kind.GAUGE
)
REQUESTS_WAITING = Metric(
    "outrider.num_requests_waiting", "Choices of requests that wait for a target with room.", kind=Kind.GAUGE
)
SEQUENCES = Metric(
    "outrider.sequences",
    "Running sequences by what their target does now: speculative, or plain (no drafter, off, or probing).",
    labels=("mode",),
    values=(("speculative", "plain"),),
    kind=Kind.GAUGE,
)
WORKERS = Metric(
    "outrider.workers",
    "Workers that the scheduler knows, by role and state.",
    labels=("role", "state"),
    values=(
        ("target", "draft"),
        ("connecting", "ready", "refused", "suspended", "lost", "draining"),
    ),
    kind=Kind.GAUGE,
)
METADATA_UP = Metric(
    "outrider.metadata.up",
    "1 while Redis takes records; without it requests are served, not resumed.",
    kind=Kind.GAUGE,
)

GAUGES = (REQUESTS_RUNNING, REQUESTS_WAITING, SEQUENCES, WORKERS, DRAFT_LINK_TIME)
"""What `Scheduler.gauges` reads."""

METRICS = (
    NUM_DRAFTS,
    NUM_DRAFT_TOKENS,
    NUM_ACCEPTED_TOKENS,
    NUM_ACCEPTED_TOKENS_PER_POS,
    STALE_BLOCKS,
    AHEAD_HITS,
    AHEAD_MISSES,
    FAN_OUT_HITS,
    FAN_OUT_MISSES,
    DECISIONS,
    DRAFT_LENGTH,
    WINDOW,
    FALLBACK,
    MODE,
    DRAFT_WAIT,
    FAILOVERS,
    AUDIT_MISMATCHES,
    AUDITS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    REQUEST_SUCCESS,
    REQUEST_ERRORS,
    QUEUE_TIME,
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    SEQUENCES,
    WORKERS,
    METADATA_UP,
    WIRE_BYTES,
    WIRE_MESSAGES,
    LOST_STREAMS,
    DRAFT_LINK_TIME,
)


_POSITIONS = tuple(map(str, range(MAX_POSITION)))


def position_labels(count: int) -> tuple[str, ...]:
    """Of so many candidates on one path, from depth 0 on."""
    return (*_POSITIONS[:count], *[f"{MAX_POSITION}+"] * (count - MAX_POSITION))
