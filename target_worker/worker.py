"""The target worker: one loop that packs the rows of all sequences of all schedulers into forwards."""

from __future__ import annotations

import logging
import math
import time

from specdec.engine.model import LanguageModel
from specdec.grammar import MaskFactory
from specdec.log_extra import about
from specdec.messages import Committed, Failure, Identity, TargetItem, TargetResult
from specdec.metric import NO_COUNTERS, Counters
from specdec.worker import Outgoing, Worker
from target_worker import counters as metrics
from target_worker.batch import Selector, Work
from target_worker.config import TargetConfig
from target_worker.gathering import Gathering
from target_worker.intake import Intake
from target_worker.step import Outcome, step

_log = logging.getLogger(__name__)


class TargetWorker(Worker[TargetItem, TargetResult]):
    """Verifies candidates and decodes plainly for many sequences."""

    def __init__(
        self,
        config: TargetConfig,
        model: LanguageModel,
        identity: Identity,
        make_mask: MaskFactory | None = None,
        counters: Counters = NO_COUNTERS,
    ) -> None:
        super().__init__(identity)
        self._counters = counters
        self._model = model
        self._load.kv_blocks_total = model.blocks_total
        self._intake = Intake(config, model, self._load, make_mask, counters)
        self._selector = Selector(config, model, counters)
        self._gathering = Gathering()
        self._looked_at = 0.0
        self._held_since: float | None = None
        self._held_until = math.inf
        """Work that is there is not begun before, unless something comes."""

    def drain(self) -> None:
        self._intake.draining = True

    def _turn(self, outgoing: Outgoing[TargetResult]) -> bool:
        self._receive(outgoing)
        self._count()
        self._looked_at = now = time.monotonic()
        batch = self._selector.select(self._intake.sequences.values(), now)
        if self._holds(batch, now):
            return False
        if batch:
            outcomes = step(self._model, batch)
            self._count_step(batch, time.monotonic() - now)
            self._settle(outcomes, len(batch), outgoing)
        worked = bool(batch) or self._fail_starved(now, outgoing)
        self._count()
        return worked

    def _holds(self, batch: list[Work], now: float) -> bool:
        """Whether the forward is to wait for blocks that are expected."""
        hold = self._gathering.hold(batch, self._intake.sequences.values(), now)
        if hold:
            self._held_since, self._held_until = self._held_since or now, now + hold
            return True
        if batch and self._held_since is not None:
            self._counters.observe(metrics.HOLD_TIME, now - self._held_since)
        self._held_since, self._held_until = None, math.inf
        return False

    def _receive(self, outgoing: Outgoing[TargetResult]) -> None:
        items, closed = self._mailbox.take()
        now = time.monotonic()
        for session, item, arrived in items:
            self._gathering.answered(self._intake.sequences.get(item.header.sequence_id), arrived)
            outgoing[session] += self._intake.take(session, item, now)
        for session in closed:
            for sequence in [s for s in self._intake.sequences.values() if s.session == session]:
                self._intake.release(sequence.sequence_id)

    def _settle(self, outcomes: list[Outcome], batch_size: int, outgoing: Outgoing[TargetResult]) -> None:
        self._load.steps += 1
        self._load.largest_batch = max(self._load.largest_batch, batch_size)
        for outcome in outcomes:
            sequence = outcome.work.sequence
            outgoing[sequence.session].append(outcome.result)
            if outcome.failed:
                self._counters.add(metrics.FAILED_SEQUENCES)
                self._intake.release(sequence.sequence_id)
            elif isinstance(outcome.result.body, Committed):
                self._load.tokens += len(outcome.result.body.token_ids)
                self._gathering.committed(sequence, len(outcome.result.body.token_ids))
                if sequence.finished:
                    self._model.truncate(sequence.sequence_id, 0)
                outgoing[sequence.session] += self._intake.reconsider_held(sequence)

    def _fail_starved(self, now: float, outgoing: Outgoing[TargetResult]) -> bool:
        """Nothing could be placed although there is work: a sequence does not fit into the whole KV pool. True if one
        was ended for that."""
        starved = self._selector.starved(self._intake.sequences.values(), now)[:1]
        for sequence in starved:
            extra = about(sequence.sequence_id)
            _log.error("sequence %s does not fit into the KV memory", sequence.sequence_id, extra=extra)
            failure = Failure("the sequence does not fit into the target worker's KV memory")
            outgoing[sequence.session].append(TargetResult(sequence.header(len(sequence.log)), failure))
            self._counters.add(metrics.FAILED_SEQUENCES)
            self._intake.release(sequence.sequence_id)
        return bool(starved)

    def _count_step(self, batch: list[Work], seconds: float) -> None:
        rows = sum(len(work.segment.token_ids) for work in batch)
        self._gathering.forwarded(rows, seconds)
        candidates = sum(len(work.candidates) for work in batch if work.candidates is not None)
        decoding = sum(work.decides for work in batch)
        add, observe = self._counters.add, self._counters.observe
        observe(metrics.STEP_TIME, seconds)
        observe(metrics.BATCH_SIZE, len(batch))
        observe(metrics.ITERATION_TOKENS, rows)
        add(metrics.ROWS, candidates, "candidate")
        add(metrics.ROWS, decoding, "decode")
        add(metrics.ROWS, rows - candidates - decoding, "prefill")

    def _count(self) -> None:
        self._load.sequences = len(self._intake.sequences)
        self._load.kv_blocks_used = self._model.blocks_used

    def _idle_for(self) -> float | None:
        """Until work that is held back begins, or a grant's patience ends that had not ended when work was last looked
        for: what could step then and did not waits for room, which only a message brings."""
        waiting = [s.plain_step_at() for s in self._intake.sequences.values() if not s.finished]
        wake_at = min((at for at in waiting if at > self._looked_at), default=math.inf)
        wake_at = min(wake_at, self._held_until)
        return None if wake_at == math.inf else max(wake_at - time.monotonic(), 0.0)
