"""What a target worker counts: its forwards, the rows they were packed of, and its KV."""

from __future__ import annotations

from specdec.metric import BATCHES, STEP_SECONDS, Kind, Metric

STEP_TIME = Metric(
    "outrider.engine.step_time",
    "Time of one packed forward with drawing, accepting and committing. Its rate is the busy share of the target.",
    "s",
    kind=Kind.HISTOGRAM,
    buckets=STEP_SECONDS,
)
HOLD_TIME = Metric(
    "outrider.engine.hold_time",
    "Time for which a forward that could have begun was held back for blocks of other sequences that were expected.",
    "s",
    kind=Kind.HISTOGRAM,
    buckets=STEP_SECONDS,
)
BATCH_SIZE = Metric(
    "outrider.engine.batch_size", "Sequences in one packed forward.", kind=Kind.HISTOGRAM, buckets=BATCHES
)
ITERATION_TOKENS = Metric(
    "outrider.engine.iteration_tokens",
    "Packed tokens: rows of one forward, padding not counted.",
    kind=Kind.HISTOGRAM,
    buckets=BATCHES,
)
ROWS = Metric(
    "outrider.engine.rows",
    "Rows of forwards: `candidate` verifies a drafted token, `decode` is the last committed token of a sequence that "
    "steps, `prefill` fills KV.",
    labels=("kind",),
    values=(("candidate", "decode", "prefill"),),
)
COMMITTED_TOKENS = Metric("outrider.engine.committed_tokens", "Tokens that the target committed.")
PREFIX_CACHE_QUERIES = Metric("outrider.prefix_cache_queries", "Tokens of logs that were opened.")
PREFIX_CACHE_HITS = Metric("outrider.prefix_cache_hits", "Tokens of opened logs whose KV was found.")
PREEMPTIONS = Metric("outrider.num_preemptions", "Times that a sequence lost its KV to an older one.")
FAILED_SEQUENCES = Metric("outrider.engine.failed_sequences", "Sequences that ended because their rows failed.")
ENGINE_STALE_BLOCKS = Metric(
    "outrider.engine.stale_blocks",
    "Blocks that this worker dropped: their base was not on the log, or too many waited.",
)
REFUSED_ITEMS = Metric(
    "outrider.engine.refused_items", "Messages that this worker refused, such as those under an old epoch."
)
OPEN_SEQUENCES = Metric("outrider.engine.sequences", "Sequences that are open here.", kind=Kind.GAUGE)
KV_BLOCKS = Metric(
    "outrider.kv_cache_blocks",
    "KV blocks: those that open sequences hold, and all there are.",
    labels=("state",),
    values=(("used", "total"),),
    kind=Kind.GAUGE,
)
KV_USAGE = Metric("outrider.kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", kind=Kind.GAUGE)

METRICS = (
    STEP_TIME,
    HOLD_TIME,
    BATCH_SIZE,
    ITERATION_TOKENS,
    ROWS,
    COMMITTED_TOKENS,
    PREFIX_CACHE_QUERIES,
    PREFIX_CACHE_HITS,
    PREEMPTIONS,
    FAILED_SEQUENCES,
    ENGINE_STALE_BLOCKS,
    REFUSED_ITEMS,
    OPEN_SEQUENCES,
    KV_BLOCKS,
    KV_USAGE,
)
