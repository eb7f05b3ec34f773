"""A sequence as the target worker holds it: a replica of the log, and what may be done next with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.candidates import EMPTY, CandidateTree
from specdec.commit import FinishReason, TokenSource
from specdec.law import Law
from specdec.log import Log
from specdec.messages import Committed, Epoch, Grant, Header, TokenLogprobs, VerifyBlock
from specdec.params import NO_REPORT, Report, StopConditions


@dataclass(slots=True)
class TargetSequence:
    """opened_length: the log's length at `open`; `sources`, `logprobs` and `margins` tell of each token
    behind it. pending:
    candidates to verify on top of the log, None if nobody asked for a step. held: blocks whose base is beyond the log.
    waiting_since: when the grant's patience began. Times are monotonic seconds."""

    sequence_id: str
    session: int
    epoch: Epoch
    log: Log
    opened_length: int
    law: Law
    grant: Grant
    waiting_since: float
    report: Report = NO_REPORT
    deadline: float = math.inf
    pending: CandidateTree | None = None
    held: list[tuple[Header, VerifyBlock]] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def stop(self) -> StopConditions:
        return self.law.stop

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def waits(self) -> bool:
        """For a block behind what it committed: its grant has it wait, and nothing to verify has come."""
        return (
            self.pending is None
            and self.grant.patience > 0
            and self.opened_length < len(self.log) < self.grant.until_length
            and not self.finished
        )

    def may_step(self, now: float) -> bool:
        """Somebody asked for the next tokens, or the grant allows them unasked."""
        return self.pending is not None or self.plain_step_at() <= now

    def plain_step_at(self) -> float:
        """When the grant lets this sequence step plainly; infinity if it does not."""
        if len(self.log) >= self.grant.until_length:
            return math.inf
        return self.waiting_since + self.grant.patience

    def append(self, committed: Committed, now: float) -> None:
        """Commits tokens; what was asked for is done, and the grant's patience begins anew."""
        self.log.append(committed.token_ids)
        self.sources += committed.sources
        self.logprobs += committed.logprobs
        self.margins += committed.margins
        self.finish_reason = committed.finish_reason
        self.pending = None
        self.waiting_since = now

    def told_since(self, base_length: int) -> Committed:
        """What was committed behind `base_length` >= opened_length, to be told again."""
        start = base_length - self.opened_length
        return Committed(
            tuple(self.log.since(base_length)),
            tuple(self.sources[start:]),
            finish_reason=self.finish_reason,
            repeated_answer=True,
            logprobs=tuple(self.logprobs[start:]),
            margins=tuple(self.margins[start:]),
        )

    def candidates(self) -> CandidateTree:
        """The candidates to verify next, cut to the room that is left: the last token needs no candidate."""
        room = self.stop.max_length - len(self.log)
        return (self.pending or EMPTY).trimmed(room - 1)

    def header(self, base_length: int) -> Header:
        """Header of a result that tells what comes behind `base_length`."""
        return Header(self.sequence_id, self.epoch, base_length, self.log.digest_at(base_length))
