"""The drafter side of one sequence: which draft worker, what it was told, and when its block is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.request import GenerationRequest
from scheduler.tally import Tally
from scheduler.worker import Worker
from specdec.log import Log
from specdec.messages import DraftAdvance, DraftBlock, DraftItem, DraftOpen, DraftPlan, Header, Release
from specdec.params import StopConditions
from specdec.value import value

_PREFILL_SECONDS_PER_TOKEN = 0.02
_PATIENCE_FACTOR = 4
"""A draft that takes so many times its usual time is late."""


@dataclass(slots=True)
class _Outstanding:
    """A block that was asked for. opening: the drafter must prefill first."""

    asked_at: float
    due_at: float
    opening: bool


@value
class _Asked:
    """The latest request for blocks. prefills: the drafter has to catch up first, so its time says little. ahead: it
    drafts while the target works, on whose hardware it may wait."""

    at: float
    prefills: bool
    ahead: bool


class Drafting:
    """Asks one draft worker at a time for blocks. Times are monotonic seconds."""

    def __init__(
        self, config: SchedulerConfig, request: GenerationRequest, stop: StopConditions, log: Log, tally: Tally
    ) -> None:
        self._config = config
        self._request = request
        self._stop = stop
        self._log = log
        self._tally = tally
        self._told = 0
        self._draft_length = 0
        self._outstanding: _Outstanding | None = None
        self._asked: _Asked | None = None
        self.worker: Worker | None = None

    @property
    def due_at(self) -> float:
        """When the outstanding block counts as late; infinity if none is outstanding."""
        return self._outstanding.due_at if self._outstanding else math.inf

    @property
    def waiting(self) -> bool:
        return self._outstanding is not None

    def available(self, now: float) -> bool:
        """There is a worker that may be asked."""
        return self.worker is not None and self.worker.available(now)

    def patience(self) -> float:
        """How long the target should wait for the next block, seconds."""
        if self.worker is None:
            return 0.0
        if self._told == 0:
            return self._config.draft_timeout + _PREFILL_SECONDS_PER_TOKEN * len(self._log)
        usual = self.worker.candidate_time
        if usual is None:
            return self._config.draft_timeout
        expected = usual * (self._draft_length + 1)  # the next block may be one longer
        return min(self._config.draft_timeout, max(self._config.min_draft_patience, _PATIENCE_FACTOR * expected))

    def attach(self, worker: Worker, sequence_id: str) -> None:
        self.worker = worker
        self._told = 0
        self._settle()
        worker.sequences.add(sequence_id)

    def detach(self, sequence_id: str, header: Callable[[int], Header]) -> None:
        """Leaves the worker; the release is best effort."""
        if self.worker is None:
            return
        self.worker.sequences.discard(sequence_id)
        self.worker.send(DraftItem(header(len(self._log)), Release()))
        self.worker = None
        self._settle()

    def restart(self) -> None:
        """The worker holds no sequence of this epoch any more: open it with the next block."""
        self._told = 0
        self._settle()

    def ask(self, plan: DraftPlan, header: Callable[[int], Header], now: float, waits: bool = True) -> None:
        """Tells the worker what was committed since, and asks for blocks that continue the log. waits: the target has
        nothing to verify until one comes."""
        if self.worker is None:
            return
        # What it was asked for last and has not sent, it may not have drafted: a probe may be given up.
        drafted_itself = 0 if self._asked is not None and plan.window == 1 else self._draft_length
        self._draft_length = plan.draft_length
        patience = self.patience()
        opening = self._told == 0
        if opening:
            body: DraftOpen | DraftAdvance = DraftOpen(
                tuple(self._log.token_ids), self._request.sampling, self._stop, plan, self._log.root
            )
            base = len(self._log)
        else:
            base = self._told
            body = DraftAdvance(tuple(self._log.since(base)), plan)
        self.worker.send(DraftItem(header(base), body))
        catches_up = opening or len(self._log) - base > drafted_itself + 1
        self._asked = _Asked(now, catches_up, plan.window > 1 or not waits)
        self._told = len(self._log)
        if waits and self._outstanding is None:
            self._outstanding = _Outstanding(now, now + patience, opening)

    def tell_from(self, length: int) -> None:
        """The worker's log has `length` tokens only."""
        self._told = min(length, self._told)
        self._settle()

    def arrived(self, now: float, block: DraftBlock) -> bool:
        """The outstanding block is here. True if the drafter had to catch up for it: it took longer than it will."""
        asked, length = self._asked, block.candidates.draft_length
        if asked is not None and self.worker is not None and not asked.prefills:
            if length:
                self.worker.drafter_model.observe_draft(length, block.draft_time, asked.ahead)
            if not asked.ahead:
                self.worker.drafter_model.observe_link(max(now - asked.at - block.draft_time, 0.0))
        self._asked = None
        if self._outstanding is not None and self.worker is not None and not self._outstanding.opening:
            self.worker.record_draft(now - self._outstanding.asked_at, length)
        self._settle()
        return asked is not None and asked.prefills

    def give_up_waiting(self) -> None:
        """The block is late: it may still come, but nobody waits for it."""
        self._settle()

    def _settle(self) -> None:
        """Nobody waits for the outstanding block any more."""
        if self._outstanding is not None:
            self._tally.waited_for_draft(time.monotonic() - self._outstanding.asked_at)
        self._outstanding = None
