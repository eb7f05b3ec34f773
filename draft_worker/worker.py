"""The draft worker: one loop that batches the drafts of all sequences of all schedulers.

It keeps a replica of each log and nothing that could not be rebuilt from it. It can waste time, but never steer the
output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from draft_worker import counters as metrics
from draft_worker.config import DraftConfig
from draft_worker.fan_out import Branch
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


@dataclass(frozen=True, slots=True)
class _Started:
    """A block in the making. digest: of its base. since: when it was due. branch: None if it continues the tail."""

    sequence: DraftSequence
    job: DraftJob
    digest: bytes
    since: float
    branch: Branch | None = None

    @property
    def continues_tail(self) -> bool:
        """Perhaps by now: of a branch that the target took meanwhile."""
        return self.sequence.log.digest == self.digest

    @property
    def is_wanted(self) -> bool:
        return self.continues_tail or (self.branch is not None and self.sequence.may_take(self.branch))


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
        for session, item, _ in items:
            result = self._intake.take(session, item, now)
            if result is not None:
                outgoing[session].append(result)
        for session in closed:
            for sequence in [s for s in self._intake.sequences.values() if s.session == session]:
                self._intake.release(sequence.sequence_id, sequence.epoch)

    def _due(self) -> list[_Started]:
        """Blocks that continue a tail: those first whose target has nothing to verify, then the longest waiting. Then
        branches, as far as there is room in the batch."""
        sequences = self._intake.sequences.values()
        due = [(len(s.in_flight), s.due_since, s) for s in sequences if s.due_since is not None]
        due.sort(key=lambda entry: entry[:2])
        room = self._config.max_batch
        started = [_Started(s, s.job(), s.log.digest, since) for _, since, s in due[:room]]
        now = time.monotonic()
        for sequence in sequences:
            for branch in sequence.new_branches(room - len(started), self._config.max_in_flight):
                started.append(_Started(sequence, sequence.job(branch), branch.log.digest, now, branch))
        return started

    def _draft(self, due: list[_Started], outgoing: Outgoing[DraftResult]) -> None:
        started = {one.job.sequence_id: one for one in due}

        def abandoned(job_id: str) -> bool:
            """Looks for news between two tokens: what was told of other sequences is done, and a draft whose base is
            gone need not be finished."""
            if self._mailbox.waiting:
                self._receive(outgoing)
            return not self._is_wanted(started[job_id])

        began = time.monotonic()
        trees = self._propose([one.job for one in due], abandoned)
        now = time.monotonic()
        self._load.steps += 1
        self._load.largest_batch = max(self._load.largest_batch, len(due))
        self._count_batch(due, began, now)
        if self._mailbox.waiting:
            self._receive(outgoing)
        for one, tree in zip(due, trees, strict=True):
            if not self._is_wanted(one):
                self._count_block("abandoned")
            elif isinstance(tree, Exception):
                self._failed(one, tree, outgoing)
            else:
                self._deliver(one, tree, now, outgoing)

    def _is_wanted(self, one: _Started) -> bool:
        return self._intake.sequences.get(one.sequence.sequence_id) is one.sequence and one.is_wanted

    def _failed(self, one: _Started, error: Exception, outgoing: Outgoing[DraftResult]) -> None:
        """For a branch nobody waits, nor is it tried again."""
        sequence = one.sequence
        self._drafter.release(one.job.sequence_id)
        self._count_block("failed")
        if not one.continues_tail:
            return
        outgoing[sequence.session].append(DraftResult(_header(one), Failure(str(error) or repr(error))))
        sequence.due_since = None

    def _deliver(self, one: _Started, tree: CandidateTree, now: float, outgoing: Outgoing[DraftResult]) -> None:
        sequence = one.sequence
        self._load.tokens += len(tree)
        self._count_block("sent" if len(tree) else "empty")
        fan_out = not one.continues_tail
        if len(tree) or not (fan_out or sequence.in_flight):  # nothing to propose is news only to who waits for it
            block = DraftBlock(sequence.as_ordered(tree), now - one.since, fan_out)
            outgoing[sequence.session].append(DraftResult(_header(one), block))
        if one.branch is not None and fan_out:
            one.branch.tree = tree
        else:
            sequence.sent(tree, now)

    def _count_batch(self, jobs: Collection[_Started], began: float, ended: float) -> None:
        observe, label = self._counters.observe, self._label
        observe(metrics.DRAFT_TIME, ended - began, label)
        observe(metrics.DRAFT_BATCH_SIZE, len(jobs), label)
        for one in jobs:
            observe(metrics.QUEUE_TIME, max(began - one.since, 0.0), label)

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


def _header(one: _Started) -> Header:
    """Of the block's base."""
    return Header(one.sequence.sequence_id, one.sequence.epoch, len(one.job.log), one.digest)
