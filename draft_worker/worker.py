"""The draft worker: one loop that batches the drafts of all sequences of all schedulers.

It keeps a replica of each log and nothing that could not be rebuilt from it. It can waste time, but never steer the
output.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draft_worker.config import DraftConfig
from specdec.candidates import EMPTY, CandidateTree
from specdec.drafter import Drafter, DraftJob
from specdec.log import Log, Place
from specdec.mailbox import Mailbox
from specdec.messages import (
    DraftAdvance,
    DraftBlock,
    DraftItem,
    DraftOpen,
    DraftPlan,
    DraftResult,
    Epoch,
    Failure,
    Header,
    Identity,
    Load,
    NeedTokens,
    Refusal,
    RefusalReason,
    Release,
    Released,
)
from specdec.params import SamplingParams, StopConditions

Deliver = Callable[[list[DraftResult]], None]
_Outgoing = defaultdict[int, list[DraftResult]]

_EPOCHS_REMEMBERED = 65536
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftSequence:
    """due_since: when the tokens came that the next block continues, monotonic seconds; None if no block is due."""

    sequence_id: str
    session: int
    epoch: Epoch
    log: Log
    sampling: SamplingParams
    stop: StopConditions
    plan: DraftPlan
    due_since: float | None = None

    def order(self, plan: DraftPlan, now: float) -> None:
        self.plan = plan
        self.due_since = now if plan.draft_length else None

    @property
    def job(self) -> DraftJob:
        return DraftJob(
            self.sequence_id, self.log, self.sampling, self.stop, self.plan.draft_length, self.plan.width
        )


class DraftWorker:
    """Proposes candidates for many sequences. `deliver` is called on the worker's thread."""

    def __init__(self, config: DraftConfig, drafter: Drafter, identity: Identity) -> None:
        self.identity = identity
        self._config = config
        self._drafter = drafter
        self._load = Load()
        self._sequences: dict[str, DraftSequence] = {}
        self._released: OrderedDict[str, Epoch] = OrderedDict()
        self._draining = False
        self._mailbox: Mailbox[DraftItem, DraftResult] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="draft-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the running draft and joins its thread."""
        self._mailbox.stop()
        self._thread.join()

    def attach(self, deliver: Deliver) -> int:
        """A scheduler's stream opened; returns the session that its items are submitted under."""
        return self._mailbox.attach(deliver)

    def submit(self, session: int, items: Sequence[DraftItem]) -> None:
        """Queues items; never blocks."""
        self._mailbox.submit(session, items)

    def detach(self, session: int) -> None:
        """The stream ended: what it had open is released."""
        self._mailbox.detach(session)

    def drain(self) -> None:
        """Takes no new sequences; running ones go on."""
        self._draining = True

    def load(self) -> Load:
        """A snapshot of the counters."""
        return copy.copy(self._load)

    @property
    def busy(self) -> bool:
        """A draft is due or messages wait."""
        return self._mailbox.waiting or any(s.due_since is not None for s in list(self._sequences.values()))

    def _run(self) -> None:
        while not self._mailbox.stopped:
            outgoing: _Outgoing = defaultdict(list)
            self._receive(outgoing)
            due = self._due()
            if due:
                self._draft(due, outgoing)
            self._load.sequences = len(self._sequences)
            self._mailbox.send(outgoing)
            if not due:
                self._mailbox.wait(None)

    def _receive(self, outgoing: _Outgoing) -> None:
        items, closed = self._mailbox.take()
        now = time.monotonic()
        for session, item in items:
            result = self._take(session, item, now)
            if result is not None:
                outgoing[session].append(result)
        for session in closed:
            for sequence in [s for s in self._sequences.values() if s.session == session]:
                self._forget(sequence.sequence_id, sequence.epoch)

    def _take(self, session: int, item: DraftItem, now: float) -> DraftResult | None:
        """Applies one item by the rule of the log."""
        header, body = item.header, item.body
        sequence = self._sequences.get(header.sequence_id)
        held = sequence.epoch if sequence else self._released.get(header.sequence_id)
        if held is not None and not header.epoch.may_replace(held):
            message = f"epoch {header.epoch.number} of {header.epoch.owner}, held is {held.number} of {held.owner}"
            return self._refuse(header, RefusalReason.EPOCH, message, held)
        if isinstance(body, Release):
            self._forget(header.sequence_id, header.epoch)
            return DraftResult(header, Released())
        wrong = self._wrong_token(body.token_ids)
        if wrong is not None:
            return self._refuse(header, RefusalReason.INVALID, wrong)
        if isinstance(body, DraftOpen):
            return self._open(session, header, body, now)
        if sequence is None or sequence.epoch != header.epoch:
            return self._refuse(header, RefusalReason.UNKNOWN_SEQUENCE, "not open here under this epoch", held)
        sequence.session = session
        return self._advance(sequence, header, body, now)

    def _open(self, session: int, header: Header, body: DraftOpen, now: float) -> DraftResult | None:
        if self._draining:
            return self._refuse(header, RefusalReason.DRAINING, "this worker is draining")
        if header.sequence_id not in self._sequences and len(self._sequences) >= self._config.max_sequences:
            message = f"{len(self._sequences)} sequences are open, the limit is {self._config.max_sequences}"
            return self._refuse(header, RefusalReason.CAPACITY, message)
        log = Log(body.root_digest, body.token_ids, self._config.secret)
        if log.digest != header.prefix_digest or len(log) != header.base_length:
            message = "prefix_digest is not that of token_ids: do scheduler and worker share one secret?"
            return self._refuse(header, RefusalReason.INVALID, message)
        self._drafter.release(header.sequence_id)
        self._released.pop(header.sequence_id, None)
        sequence = DraftSequence(
            header.sequence_id, session, header.epoch, log, body.sampling, body.stop, self._trimmed(body.plan)
        )
        self._sequences[header.sequence_id] = sequence
        sequence.order(sequence.plan, now)
        return None

    def _advance(
        self, sequence: DraftSequence, header: Header, body: DraftAdvance, now: float
    ) -> DraftResult | None:
        place = sequence.log.place(header.base_length, header.prefix_digest)
        if place is Place.BEYOND:
            return DraftResult(header, NeedTokens(len(sequence.log)))
        if place is Place.STALE:
            self._load.stale_blocks += 1
            return None
        sequence.log.roll_back(header.base_length)
        sequence.log.append(body.token_ids)
        sequence.order(self._trimmed(body.plan), now)
        return None

    def _due(self) -> list[DraftSequence]:
        """Sequences whose block is due, longest waiting first."""
        due = [(s.due_since, s) for s in self._sequences.values() if s.due_since is not None]
        due.sort(key=lambda pair: pair[0])
        return [sequence for _, sequence in due[: self._config.max_batch]]

    def _draft(self, due: list[DraftSequence], outgoing: _Outgoing) -> None:
        trees = self._propose([sequence.job for sequence in due])
        now = time.monotonic()
        self._load.steps += 1
        self._load.largest_batch = max(self._load.largest_batch, len(due))
        for sequence, tree in zip(due, trees, strict=True):
            header = Header(sequence.sequence_id, sequence.epoch, len(sequence.log), sequence.log.digest)
            if isinstance(tree, Exception):
                outgoing[sequence.session].append(DraftResult(header, Failure(str(tree) or repr(tree))))
                self._drafter.release(sequence.sequence_id)
            else:
                self._load.tokens += len(tree)
                block = DraftBlock(tree, now - (sequence.due_since or now))
                outgoing[sequence.session].append(DraftResult(header, block))
            sequence.due_since = None

    def _propose(self, jobs: list[DraftJob]) -> list[CandidateTree | Exception]:
        """One tree per job. After an exception each half is tried alone, so that one bad job ends no neighbour's."""
        limit = self._drafter.context_length
        possible = [job for job in jobs if not limit or len(job.log) < limit]
        try:
            trees = dict(zip((job.sequence_id for job in possible), self._drafter.draft(possible), strict=True))
            return [trees.get(job.sequence_id, EMPTY) for job in jobs]
        except Exception as error:
            if len(jobs) == 1:
                _log.exception("drafting for %s failed", jobs[0].sequence_id)
                return [error]
            half = len(jobs) // 2
            return self._propose(jobs[:half]) + self._propose(jobs[half:])

    def _forget(self, sequence_id: str, epoch: Epoch) -> None:
        """Frees the sequence and remembers its epoch."""
        if self._sequences.pop(sequence_id, None) is not None:
            self._drafter.release(sequence_id)
        self._released[sequence_id] = epoch
        self._released.move_to_end(sequence_id)
        if len(self._released) > _EPOCHS_REMEMBERED:
            self._released.popitem(last=False)

    def _trimmed(self, plan: DraftPlan) -> DraftPlan:
        return replace(
            plan,
            draft_length=min(plan.draft_length, self._config.max_draft_length),
            width=min(plan.width, self._config.max_width),
        )

    def _wrong_token(self, token_ids: Sequence[int]) -> str | None:
        size = self.identity.vocabulary_size
        wrong = next((i for i, t in enumerate(token_ids) if t < 0 or (size and t >= size)), None)
        return None if wrong is None else f"token_ids[{wrong}] is {token_ids[wrong]}, must be in [0, {size})"

    def _refuse(self, header: Header, reason: RefusalReason, message: str, held: Epoch | None = None) -> DraftResult:
        self._load.refused_items += 1
        return DraftResult(header, Refusal(reason, message, held))
