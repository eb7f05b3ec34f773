"""What a draft worker counts. Every metric has the label `drafter`: the kind of drafter and its model."""

from __future__ import annotations

from specdec.metric import BATCHES, STEP_SECONDS, Kind, Metric

DRAFT_TIME = Metric(
    "outrider.draft.draft_time",
    "Time of drafting one batch of blocks. Its rate is the busy share of the drafter.",
    "s",
    ("drafter",),
    kind=Kind.HISTOGRAM,
    buckets=(0.0001, 0.0005, *STEP_SECONDS),
)
QUEUE_TIME = Metric(
    "outrider.draft.queue_time",
    "Time that a block was due before drafting it began.",
    "s",
    ("drafter",),
    kind=Kind.HISTOGRAM,
    buckets=(0.0001, 0.0005, *STEP_SECONDS),
)
DRAFT_BATCH_SIZE = Metric(
    "outrider.draft.batch_size",
    "Sequences drafted for together.",
    labels=("drafter",),
    kind=Kind.HISTOGRAM,
    buckets=BATCHES,
)
DRAFTED_TOKENS = Metric("outrider.draft.num_draft_tokens", "Candidates that were drafted.", labels=("drafter",))
DRAFTED_BLOCKS = Metric(
    "outrider.draft.blocks",
    "Blocks by what became of them: sent, empty (nothing to propose), abandoned (the log changed meanwhile), failed.",
    labels=("drafter", "outcome"),
)
DRAFT_STALE = Metric(
    "outrider.draft.stale_items", "Messages whose base is not on this worker's log, dropped.", labels=("drafter",)
)
DRAFT_REFUSED_ITEMS = Metric(
    "outrider.draft.refused_items",
    "Messages that this worker refused, such as those under an old epoch.",
    labels=("drafter",),
)
DRAFT_SEQUENCES = Metric(
    "outrider.draft.sequences", "Sequences that are open here.", labels=("drafter",), kind=Kind.GAUGE
)

METRICS = (
    DRAFT_TIME,
    QUEUE_TIME,
    DRAFT_BATCH_SIZE,
    DRAFTED_TOKENS,
    DRAFTED_BLOCKS,
    DRAFT_STALE,
    DRAFT_REFUSED_ITEMS,
    DRAFT_SEQUENCES,
)
