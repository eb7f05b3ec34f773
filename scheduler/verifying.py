"""The target side of one sequence: which target worker holds it under which epoch, and what it may do unasked."""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler.config import SchedulerConfig
from scheduler.links import SequenceRecord
from scheduler.request import GenerationRequest
from scheduler.worker import Worker
from specdec.candidates import EMPTY, CandidateTree
from specdec.log import Log
from specdec.messages import Epoch, Grant, Header, Release, TargetItem, TargetOpen, VerifyBlock
from specdec.params import StopConditions

_WATCHED_GRANT_TOKENS = 8


class Verifying:
    """Sends items under the sequence's epoch. Times are monotonic seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        request: GenerationRequest,
        sequence_id: str,
        stop: StopConditions,
        log: Log,
        deadline: float,
    ) -> None:
        self._config = config
        self._request = request
        self._sequence_id = sequence_id
        self._stop = stop
        self._log = log
        self._deadline = deadline
        self._granted_until = 0
        self._patience = 0.0
        self.epoch = Epoch(0, config.scheduler_id)
        self.worker: Worker | None = None
        self._busy_since = math.inf
        self._traceparent = _below(request.traceparent, sequence_id) if request.traced else request.traceparent

    def heard(self, now: float) -> None:
        """The target showed progress; it may now wait for a block as long as it was told to."""
        self._busy_since = now + self._patience

    @property
    def lost_at(self) -> float:
        """When a target without progress has lost the sequence; waiting for a block as it was told is no fault."""
        return self._busy_since + self._config.round_timeout

    @property
    def plain(self) -> bool:
        """The target goes on by itself, without waiting for blocks."""
        return self._patience == 0.0

    def header(self, base_length: int, now: float, prefix_digest: bytes | None = None) -> Header:
        """prefix_digest: of a base that may lie beyond the log; None: as the log has it."""
        remaining = None if self._deadline == math.inf else max(self._deadline - now, 0.0)
        return Header(
            self._sequence_id,
            self.epoch,
            base_length,
            self._log.digest_at(base_length) if prefix_digest is None else prefix_digest,
            self._traceparent,
            self._request.tracestate,
            remaining,
        )

    def headers(self, now: float) -> Callable[[int], Header]:
        """`header` by base length."""
        return lambda base_length: self.header(base_length, now)

    def record(self, prompt_length: int, draft_worker: str) -> SequenceRecord:
        """Who has the sequence under which epoch, and its log."""
        return SequenceRecord(
            self._sequence_id,
            self.epoch.number,
            self.epoch.owner,
            self._request.model,
            prompt_length,
            len(self._log),
            self.worker.name if self.worker else "",
            draft_worker,
            self._log.token_ids,
        )

    def raise_epoch(self, above: int = 0) -> None:
        self.epoch = Epoch(max(self.epoch.number, above) + 1, self._config.scheduler_id)

    def open(self, worker: Worker, patience: float, now: float, first_plainly: bool = False) -> None:
        """Opens the log on `worker` under the present epoch. first_plainly: it decides one token at once, by the
        forward that ends the prefill, and then waits for what comes."""
        grant = self._grant(patience)
        if first_plainly:
            self._granted_until = len(self._log) + 1
            grant = Grant(self._granted_until)
        self.worker = worker
        worker.sequences.add(self._sequence_id)
        body = TargetOpen(
            tuple(self._log.token_ids),
            self._request.sampling,
            self._stop,
            grant,
            self._log.root,
            self._request.report,
        )
        worker.send(TargetItem(self.header(len(self._log), now), body))
        self._busy_since = now

    def verify(self, header: Header, candidates: CandidateTree, patience: float, now: float) -> None:
        """Candidates behind the header's base, which may lie behind the target's own log by now, or ahead of it."""
        if self.worker is not None:
            self.worker.send(TargetItem(header, VerifyBlock(candidates, self._grant(patience))))
            self._busy_since = now

    def check(self, candidates: CandidateTree) -> None:
        """Raises InvalidCandidates for what the target would refuse."""
        identity = self.worker.identity if self.worker else None
        candidates.validate_for(self._request.sampling.accept_rule, identity.vocabulary_size if identity else 0)

    def forward(self, block: Header, candidates: CandidateTree, patience: float, now: float) -> None:
        """Candidates as a draft worker sent them, under its header."""
        self.verify(self.header(block.base_length, now, block.prefix_digest), candidates, patience, now)

    def step(self, patience: float, now: float) -> None:
        """A plain step on top of the log, and then blocks are waited for."""
        self.verify(self.header(len(self._log), now), EMPTY, patience, now)

    def step_plainly(self, now: float) -> None:
        """Lets the target go on by itself; says so only when the grant runs short, so that plain costs no message per
        token."""
        short = self._granted_until - len(self._log) <= self._grant_tokens // 2
        if not self.plain or (short and self._granted_until < self._stop.max_length):
            self.step(0.0, now)

    def leave(self, now: float) -> None:
        """Releases the sequence, best effort: a target that does not hear it loses it with the stream or the epoch."""
        if self.worker is None:
            return
        self.worker.sequences.discard(self._sequence_id)
        self.worker.send(TargetItem(self.header(len(self._log), now), Release()))
        self.worker = None
        self._busy_since = math.inf

    def _grant(self, patience: float) -> Grant:
        self._patience = patience
        self._granted_until = min(len(self._log) + self._grant_tokens, self._stop.max_length)
        return Grant(self._granted_until, patience)

    @property
    def _grant_tokens(self) -> int:
        """Short while the text may end the answer: what the target decodes beyond is wasted."""
        watched = self._request.watcher is not None
        return min(self._config.grant_tokens, _WATCHED_GRANT_TOKENS) if watched else self._config.grant_tokens


def _below(traceparent: str, sequence_id: str) -> str:
    """The context of the sequence's own span, whose id is the sequence's: version, trace id, *span id*, flags."""
    version, trace_id, _, flags = traceparent.split("-")
    return "-".join((version, trace_id, sequence_id, flags))
