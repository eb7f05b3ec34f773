"""The draft worker: one loop that batches the drafts of all sequences of all schedulers.

It keeps a replica of each log and nothing that could not be rebuilt from it. It can waste time, but never steer the
output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from draft_worker import counters as metrics
from draft_worker.config import DraftConfig
from draft_worker.intake import Intake
from draft_worker.sequence import DraftSequence
from specdec.candidates import EMPTY, TOKEN_ID_LIMIT, CandidateTree, InvalidCandidates
from specdec.drafter import Abandoned, Drafter, DraftJob
from specdec.grammar import MaskFactory
from specdec.log_extra import about
from specdec.messages import DraftBlock, DraftItem, DraftResult, Failure, Header, Identity
from specdec.metric import NO_COUNTERS, Counters
from specdec.worker import Outgoing, Worker

_log = logging.getLogger(__name__)

_Started = tuple[DraftSequence, bytes, float]
"""A sequence that is drafted for, the digest of its log then, and since when its block was due."""


class DraftWorker(Worker[DraftItem, DraftResult]):
    """Proposes candidates for many sequences."""

    def __init__(
        self,
        config: DraftConfig,
        drafter: Drafter,
        identity: Identity,
        make_mask: MaskFactory | None = None,
        counters: Counters = NO_COUNTERS,
    ) -> None:
        super().__init__(identity)
        self._counters = counters
        self._label = identity.drafter_label
        self._config = config
        self._drafter = drafter
        self._intake = Intake(config, drafter, identity.vocabulary_size, self._load, make_mask)

    def drain(self) -> None:
        self._intake.draining = True

    def _turn(self, outgoing: Outgoing[DraftResult]) -> bool:
        self._receive(outgoing)
        self._load.sequences = len(self._intake.sequences)
        due = self._due()
        if due:
            self._draft(due, outgoing)
        return bool(due)

    def _idle_for(self) -> float | None:
        return None

    def _receive(self, outgoing: Outgoing[DraftResult]) -> None:
        items, closed = self._mailbox.take()
        now = time.monotonic()
        for session, item in items:
            result = self._intake.take(session, item, now)
            if result is not None:
                outgoing[session].append(result)
        for session in closed:
            for sequence in [s for s in self._intake.sequences.values() if s.session == session]:
                self._intake.release(sequence.sequence_id, sequence.epoch)

    def _due(self) -> list[DraftSequence]:
        """Sequences whose next block is due: those first whose target has nothing to verify, then the longest
        waiting."""
        due = [(len(s.in_flight), s.due_since, s) for s in self._intake.sequences.values() if s.due_since is not None]
        due.sort(key=lambda entry: entry[:2])
        return [sequence for _, _, sequence in due[: self._config.max_batch]]

    def _draft(self, due: list[DraftSequence], outgoing: Outgoing[DraftResult]) -> None:
        started: dict[str, _Started] = {s.sequence_id: (s, s.log.digest, s.due_since or 0.0) for s in due}

        def abandoned(sequence_id: str) -> bool:
            """Looks for news between two tokens: what was told of other sequences is done, and a draft whose base is
            gone need not be finished."""
            if self._mailbox.waiting:
                self._receive(outgoing)
            sequence, digest, _ = started[sequence_id]
            return self._intake.sequences.get(sequence_id) is not sequence or sequence.log.digest != digest

        began = time.monotonic()
        trees = self._propose([sequence.job for sequence in due], abandoned)
        now = time.monotonic()
        self._load.steps += 1
        self._load.largest_batch = max(self._load.largest_batch, len(due))
        self._count_batch(started.values(), began, now)
        for sequence, tree in zip(due, trees, strict=True):
            if abandoned(sequence.sequence_id):
                self._count_block("abandoned")
                continue
            header = Header(sequence.sequence_id, sequence.epoch, len(sequence.log), sequence.log.digest)
            if isinstance(tree, Exception):
                outgoing[sequence.session].append(DraftResult(header, Failure(str(tree) or repr(tree))))
                self._drafter.release(sequence.sequence_id)
                sequence.due_since = None
                self._count_block("failed")
                continue
            self._load.tokens += len(tree)
            self._count_block("sent" if len(tree) else "empty")
            since = started[sequence.sequence_id][2]
            if len(tree) or not sequence.in_flight:  # nothing to propose is news only to who waits for it
                outgoing[sequence.session].append(DraftResult(header, DraftBlock(tree, now - since)))
            sequence.sent(tree, now)

    def _count_batch(self, jobs: Collection[_Started], began: float, ended: float) -> None:
        observe, label = self._counters.observe, self._label
        observe(metrics.DRAFT_TIME, ended - began, label)
        observe(metrics.DRAFT_BATCH_SIZE, len(jobs), label)
        for _, _, due_since in jobs:
            observe(metrics.QUEUE_TIME, max(began - due_since, 0.0), label)

    def _count_block(self, outcome: str) -> None:
        self._counters.add(metrics.DRAFTED_BLOCKS, 1, self._label, outcome)

    def _checked(self, tree: CandidateTree) -> CandidateTree | Exception:
        """A drafter that proposes no tree of real ids fails for that sequence only."""
        try:
            tree.validate(self.identity.vocabulary_size or TOKEN_ID_LIMIT)
        except InvalidCandidates as error:
            return error
        return tree

    def _propose(self, jobs: list[DraftJob], abandoned: Abandoned) -> list[CandidateTree | Exception]:
        """One tree per job. After an exception each half is tried alone, so that one bad job ends no neighbour's."""
        limit = self._drafter.context_length
        possible = [job for job in jobs if not limit or len(job.log) < limit]
        try:
            drafted = [self._checked(tree) for tree in self._drafter.draft(possible, abandoned)]
            trees = dict(zip((job.sequence_id for job in possible), drafted, strict=True))
            return [trees.get(job.sequence_id, EMPTY) for job in jobs]
        except Exception as error:
            if len(jobs) == 1:
                sequence_id = jobs[0].sequence_id
                _log.exception("drafting for %s failed", sequence_id, extra=about(sequence_id, private=True))
                return [error]
            half = len(jobs) // 2
            return self._propose(jobs[:half], abandoned) + self._propose(jobs[half:], abandoned)
