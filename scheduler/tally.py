"""Counting: what happens to one sequence goes into its own summary and into the process's counters, in one call."""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache
from types import TracebackType

from scheduler import counters as metrics
from scheduler.counters import Counters, Metric, position_labels
from scheduler.in_flight import Outcome
from scheduler.journal import Journal
from scheduler.request import Event, SpeculationSummary, Started, Tokens
from specdec.commit import FinishReason
from specdec.decision import Decision
from specdec.messages import Committed
from specdec.metric import Addition


class Tally:
    """Of one sequence."""

    def __init__(self, counters: Counters, journal: Journal) -> None:
        self._counters = counters
        self._journal = journal
        self.summary = SpeculationSummary()
        self.drafter = "unnamed"
        """Label of the draft worker that the sequence was given last."""

    def step(self, committed: Committed) -> int:
        """One step of the target, told for the first time. Returns how many candidates were accepted."""
        accepted = self.summary.count(committed)
        self._counters.add_each(_additions_of_step(self.drafter, committed.num_draft_tokens, accepted))
        return accepted

    def streamed(self, tokens: int) -> None:
        self._counters.add(metrics.GENERATION_TOKENS, tokens)

    def stale_block(self, prefix_digest: bytes | None = None) -> None:
        """prefix_digest: of the base of a block that went to the target, and was stale there."""
        self._journal.stale(prefix_digest)
        self.summary.num_stale_blocks += 1
        self._counters.add(metrics.STALE_BLOCKS)

    def ahead(self, outcome: Outcome) -> None:
        if not outcome.num_ahead:
            return
        self.summary.num_ahead_hits += outcome.hits
        self.summary.num_ahead_misses += outcome.misses
        self.summary.num_fan_out_hits += outcome.fan_out_hits
        self.summary.num_fan_out_misses += outcome.fan_out_misses
        for metric, count in (
            (metrics.AHEAD_HITS, outcome.hits),
            (metrics.AHEAD_MISSES, outcome.misses),
            (metrics.FAN_OUT_HITS, outcome.fan_out_hits),
            (metrics.FAN_OUT_MISSES, outcome.fan_out_misses),
        ):
            if count:
                self._counters.add(metric, count)

    def fall_back(self, reason: str) -> None:
        self.summary.fallbacks[reason] = self.summary.fallbacks.get(reason, 0) + 1
        self._counters.add(metrics.FALLBACK, 1, reason)
        self._journal.fell_back(reason)

    def decided(self, decision: Decision) -> None:
        """What the policy wants next."""
        kind = "off" if decision.off else "probe" if decision.probe else "draft"
        self._counters.add(metrics.DECISIONS, 1, kind)
        if kind == "draft":
            self._counters.observe(metrics.DRAFT_LENGTH, decision.draft_length)
            self._counters.observe(metrics.WINDOW, decision.window)

    def fail_over(self) -> None:
        self.summary.num_failovers += 1
        self._counters.add(metrics.FAILOVERS)

    def waited_for_draft(self, seconds: float) -> None:
        self._counters.add(metrics.DRAFT_WAIT, seconds)


@lru_cache(maxsize=1024)
def _additions_of_step(drafter: str, num_draft_tokens: int, accepted: int) -> tuple[Addition, ...]:
    """What one step of the target adds to the counters: a few kinds of steps are nearly all."""
    if not num_draft_tokens:
        return ((metrics.MODE, 1, ("plain",)),)
    return (
        (metrics.MODE, 1, ("speculative",)),
        (metrics.NUM_DRAFTS, 1, (drafter,)),
        (metrics.NUM_DRAFT_TOKENS, num_draft_tokens, (drafter,)),
        (metrics.NUM_ACCEPTED_TOKENS, accepted, (drafter,)),
        *((metrics.NUM_ACCEPTED_TOKENS_PER_POS, 1, (label,)) for label in position_labels(accepted)),
    )


class RequestTimes:
    """Context manager around one choice from its arrival to its end, whatever ends it. Sees its events as they pass.
    traceparent: of the request, for exemplars."""

    def __init__(self, counters: Counters, traceparent: str = "") -> None:
        self._counters = counters
        self._traceparent = traceparent
        self._arrived_at = time.monotonic()
        self._first_at: float | None = None
        self._first_count = 0
        self._model = ""
        self._ended = False

    def __enter__(self) -> RequestTimes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        cancelled = isinstance(error, (GeneratorExit, asyncio.CancelledError))
        self._end("cancelled" if cancelled or kind is None else kind.__name__)

    def saw(self, event: Event) -> None:
        if isinstance(event, Tokens):
            if self._first_at is None:
                self._first_at = time.monotonic()
                self._first_count = len(event.token_ids)
                self._observe(metrics.TIME_TO_FIRST_TOKEN, self._first_at - self._arrived_at)
        elif isinstance(event, Started):
            self._model = event.model
            self._counters.add(metrics.PROMPT_TOKENS, event.prompt_tokens)
            self._observe(metrics.QUEUE_TIME, time.monotonic() - self._arrived_at)
        else:
            self._finished(event.finish_reason, event.completion_tokens)

    def _finished(self, reason: FinishReason, completion_tokens: int) -> None:
        self._counters.add(metrics.REQUEST_SUCCESS, 1, reason.value)
        later = completion_tokens - self._first_count
        if self._first_at is not None and later > 0:
            per_token = (time.monotonic() - self._first_at) / later
            self._observe(metrics.TIME_PER_OUTPUT_TOKEN, per_token)
        self._end("")

    def _end(self, error_type: str) -> None:
        self._ended = True
        if error_type:
            self._counters.add(metrics.REQUEST_ERRORS, 1, error_type)
        self._observe(metrics.REQUEST_DURATION, time.monotonic() - self._arrived_at, error_type)

    def _observe(self, metric: Metric, value: float, *labels: str) -> None:
        self._counters.observe(metric, value, self._model, *labels, traceparent=self._traceparent)
