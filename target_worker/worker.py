"""The target worker: one loop that packs the rows of all sequences of all schedulers into forwards.

Streams come and go on other threads; the model is touched by the loop's own thread only.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from specdec.engine.model import LanguageModel
from specdec.grammar import MaskFactory
from specdec.mailbox import Mailbox
from specdec.messages import Committed, Failure, Identity, Load, TargetItem, TargetResult
from target_worker.batch import Selector
from target_worker.config import TargetConfig
from target_worker.intake import Intake
from target_worker.step import Outcome, step

Deliver = Callable[[list[TargetResult]], None]

_log = logging.getLogger(__name__)


class TargetWorker:
    """Verifies candidates and decodes plainly for many sequences. `deliver` is called on the worker's thread."""

    def __init__(
        self,
        config: TargetConfig,
        model: LanguageModel,
        identity: Identity,
        make_mask: MaskFactory | None = None,
    ) -> None:
        self.identity = identity
        self._model = model
        self._load = Load(kv_blocks_total=model.blocks_total)
        self._intake = Intake(config, model, self._load, make_mask)
        self._selector = Selector(config, model)
        self._mailbox: Mailbox[TargetItem, TargetResult] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="target-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the running forward and joins its thread."""
        self._mailbox.stop()
        self._thread.join()

    def attach(self, deliver: Deliver) -> int:
        """A scheduler's stream opened; returns the session that its items are submitted under."""
        return self._mailbox.attach(deliver)

    def submit(self, session: int, items: Sequence[TargetItem]) -> None:
        """Queues items; never blocks."""
        self._mailbox.submit(session, items)

    def detach(self, session: int) -> None:
        """The stream ended: what it had open is released."""
        self._mailbox.detach(session)

    def drain(self) -> None:
        """Takes no new sequences; running ones go on."""
        self._intake.draining = True

    def load(self) -> Load:
        """A snapshot of the counters."""
        return copy.copy(self._load)

    @property
    def busy(self) -> bool:
        """Sequences are open or messages wait."""
        return self._mailbox.waiting or bool(self._load.sequences)

    def _run(self) -> None:
        while not self._mailbox.stopped:
            outgoing: dict[int, list[TargetResult]] = defaultdict(list)
            self._receive(outgoing)
            self._count()
            now = time.monotonic()
            batch = self._selector.select(self._intake.sequences.values(), now)
            if batch:
                self._settle(step(self._model, batch), len(batch), outgoing)
            nothing_to_do = not batch and not self._fail_starved(now, outgoing)
            self._count()
            self._mailbox.send(outgoing)
            if nothing_to_do:
                self._wait(now)

    def _receive(self, outgoing: dict[int, list[TargetResult]]) -> None:
        items, closed = self._mailbox.take()
        now = time.monotonic()
        for session, item in items:
            outgoing[session] += self._intake.take(session, item, now)
        for session in closed:
            for sequence in [s for s in self._intake.sequences.values() if s.session == session]:
                self._intake.release(sequence.sequence_id)

    def _settle(self, outcomes: list[Outcome], batch_size: int, outgoing: dict[int, list[TargetResult]]) -> None:
        self._load.steps += 1
        self._load.largest_batch = max(self._load.largest_batch, batch_size)
        for outcome in outcomes:
            sequence = outcome.work.sequence
            outgoing[sequence.session].append(outcome.result)
            if outcome.failed:
                self._intake.release(sequence.sequence_id)
            elif isinstance(outcome.result.body, Committed):
                self._load.tokens += len(outcome.result.body.token_ids)
                if sequence.finished:
                    self._model.truncate(sequence.sequence_id, 0)
                outgoing[sequence.session] += self._intake.reconsider_held(sequence)

    def _fail_starved(self, now: float, outgoing: dict[int, list[TargetResult]]) -> bool:
        """Nothing could be placed although there is work: a sequence does not fit into the whole KV pool. True if one
        was ended for that."""
        starved = self._selector.starved(self._intake.sequences.values(), now)[:1]
        for sequence in starved:
            _log.error("sequence %s does not fit into the KV memory", sequence.sequence_id)
            failure = Failure("the sequence does not fit into the target worker's KV memory")
            outgoing[sequence.session].append(TargetResult(sequence.header(len(sequence.log)), failure))
            self._intake.release(sequence.sequence_id)
        return bool(starved)

    def _count(self) -> None:
        self._load.sequences = len(self._intake.sequences)
        self._load.kv_blocks_used = self._model.blocks_used

    def _wait(self, now: float) -> None:
        """Until a message comes, or a grant's patience ends that had not ended when work was looked for at `now`:
        what could step then and did not waits for room, which only a message brings."""
        waiting = [s.plain_step_at() for s in self._intake.sequences.values() if not s.finished]
        wake_at = min((at for at in waiting if at > now), default=math.inf)
        timeout = None if wake_at == math.inf else max(wake_at - time.monotonic(), 0.0)
        self._mailbox.wait(timeout)
