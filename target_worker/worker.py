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
from specdec.messages import Committed, Failure, Identity, Load, TargetItem, TargetResult
from target_worker.batch import Selector
from target_worker.config import TargetConfig
from target_worker.intake import Intake
from target_worker.step import Outcome, step

Deliver = Callable[[list[TargetResult]], None]

_log = logging.getLogger(__name__)


class TargetWorker:
    """Verifies candidates and decodes plainly for many sequences. `deliver` is called on the worker's thread."""

    def __init__(self, config: TargetConfig, model: LanguageModel, identity: Identity) -> None:
        self.identity = identity
        self._model = model
        self._load = Load(kv_blocks_total=model.blocks_total)
        self._intake = Intake(config, model, self._load)
        self._selector = Selector(config, model)
        self._wake = threading.Condition()
        self._inbox: list[tuple[int, TargetItem]] = []
        self._detached: list[int] = []
        self._sessions: dict[int, Deliver] = {}
        self._next_session = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="target-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the running forward and joins its thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def attach(self, deliver: Deliver) -> int:
        """A scheduler's stream opened; returns the session that its items are submitted under."""
        with self._wake:
            self._next_session += 1
            self._sessions[self._next_session] = deliver
            return self._next_session

    def submit(self, session: int, items: Sequence[TargetItem]) -> None:
        """Queues items; never blocks."""
        with self._wake:
            self._inbox += [(session, item) for item in items]
            self._wake.notify()

    def detach(self, session: int) -> None:
        """The stream ended: what it had open is released."""
        with self._wake:
            self._sessions.pop(session, None)
            self._detached.append(session)
            self._wake.notify()

    def drain(self) -> None:
        """Takes no new sequences; running ones go on."""
        self._intake.draining = True

    def load(self) -> Load:
        """A snapshot of the counters."""
        return copy.copy(self._load)

    @property
    def busy(self) -> bool:
        """Sequences are open or messages wait."""
        return bool(self._inbox or self._load.sequences)

    def _run(self) -> None:
        while not self._stopping:
            outgoing: dict[int, list[TargetResult]] = defaultdict(list)
            self._receive(outgoing)
            now = time.monotonic()
            batch = self._selector.select(self._intake.sequences.values(), now)
            if batch:
                self._settle(step(self._model, batch), len(batch), outgoing)
            else:
                self._fail_starved(now, outgoing)
            self._count()
            self._send(outgoing)
            if not batch:
                self._wait()

    def _receive(self, outgoing: dict[int, list[TargetResult]]) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
            detached, self._detached = self._detached, []
        now = time.monotonic()
        for session, item in inbox:
            outgoing[session] += self._intake.take(session, item, now)
        for session in detached:
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

    def _fail_starved(self, now: float, outgoing: dict[int, list[TargetResult]]) -> None:
        """Nothing could be placed although there is work: not even the oldest sequence fits into the KV pool."""
        for sequence in self._selector.starved(self._intake.sequences.values(), now)[:1]:
            _log.error("sequence %s does not fit into the KV memory", sequence.sequence_id)
            failure = Failure("the sequence does not fit into the target worker's KV memory")
            outgoing[sequence.session].append(TargetResult(sequence.header(len(sequence.log)), failure))
            self._intake.release(sequence.sequence_id)

    def _count(self) -> None:
        self._load.sequences = len(self._intake.sequences)
        self._load.kv_blocks_used = self._model.blocks_used

    def _send(self, outgoing: dict[int, list[TargetResult]]) -> None:
        for session, results in outgoing.items():
            deliver = self._sessions.get(session)
            if deliver is not None and results:
                deliver(results)

    def _wait(self) -> None:
        """Until a message comes, or a grant's patience ends."""
        waiting = [s.plain_step_at() for s in self._intake.sequences.values() if not s.finished]
        wake_at = min(waiting, default=math.inf)
        timeout = None if wake_at == math.inf else max(wake_at - time.monotonic(), 0.0)
        with self._wake:
            if not (self._inbox or self._detached or self._stopping):
                self._wake.wait(timeout)
