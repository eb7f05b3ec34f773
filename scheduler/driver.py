"""One sequence from open to its terminal event: draft, verify, append, stream; and what to do when a part fails.

Everything that happens to the sequence is handled in order, most of it through one inbox, so each handler sees a
settled state. The log is the only truth: after any loss it is opened again elsewhere under a higher epoch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence

from scheduler.admission import Admission
from scheduler.answer import Answer
from scheduler.config import SchedulerConfig
from scheduler.control import Control
from scheduler.counters import Counters
from scheduler.drafting import Drafting
from scheduler.entries import Reader
from scheduler.errors import InvalidRequest, SequenceFailed
from scheduler.inbox import Inbox
from scheduler.journal import Journal
from scheduler.links import Recorder, SequenceRecord
from scheduler.pool import Pool
from scheduler.request import Event, GenerationRequest, Speculation, Started
from scheduler.tally import Tally
from scheduler.verifying import Verifying
from scheduler.worker import AnyResult, Worker
from specdec.candidates import InvalidCandidates
from specdec.commit import FinishReason
from specdec.decision import OFF, Decision
from specdec.goodput import Explained
from specdec.grammar import GRAMMAR_REFUSED
from specdec.log import Log, Place
from specdec.log_extra import about
from specdec.messages import (
    Committed,
    DraftBlock,
    DraftResult,
    Failure,
    Header,
    NeedTokens,
    Refusal,
    RefusalReason,
    StaleBlock,
    TargetResult,
)
from specdec.params import StopConditions
from specdec.policy import SpeculationPolicy

_log = logging.getLogger(__name__)


class Driver:
    """Drives one sequence. `events` may be iterated once; closing it releases the sequence everywhere."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: Pool,
        recorder: Recorder,
        request: GenerationRequest,
        sequence_id: str,
        log: Log,
        stop: StopConditions,
        policy: SpeculationPolicy,
        counters: Counters,
        readers: Sequence[Reader] = (),
    ) -> None:
        self._config = config
        self._pool = pool
        self._recorder = recorder
        self.request = request
        now = time.monotonic()
        self._deadline = math.inf if request.timeout is None else now + request.timeout
        self._admission = Admission(config, pool, request, self._deadline)
        self._answer = Answer(request, log, now)
        self._verifying = Verifying(config, request, sequence_id, stop, log, self._deadline)
        self._journal = Journal(sequence_id, readers)
        self.tally = Tally(counters, self._journal)
        self._drafting = Drafting(config, request, stop, log, self.tally)
        self._control = Control(policy, log, self.tally, stop.max_length, config.fan_out)
        self._about = about(sequence_id, request.traceparent)
        self._finish_reason: FinishReason | None = None
        self.inbox = Inbox()
        self.sequence_id = sequence_id
        self.log = log
        self.stop = stop
        self.prompt_length = stop.prompt_length
        self.opened_length = 0
        """The log's length when its target opened it."""
        self.refused_results = 0

    @property
    def target(self) -> Worker | None:
        """Where the sequence is open."""
        return self._verifying.worker

    @property
    def waits_for_room(self) -> bool:
        """Its target has none."""
        return self._admission.waits_for_room

    @property
    def speculates(self) -> bool:
        """Its target does not go on by itself: it verifies blocks, or waits for one."""
        return self._drafting.worker is not None and not self._verifying.plain

    @property
    def drafts_ahead(self) -> bool:
        return self._control.plan.window > 1

    def explained(self) -> Sequence[Explained]:
        """The latest decisions of its policy with their reasons, oldest first."""
        return self._control.explained()

    def record(self) -> SequenceRecord:
        drafter = self._drafting.worker
        return self._verifying.record(self.prompt_length, drafter.name if drafter else "")

    async def events(self) -> AsyncGenerator[Event, None]:
        """Started, Tokens..., Finished. Raises a RequestError instead of Finished."""
        error: BaseException | None = None
        self._journal.admitted(self.request)
        try:
            await self._place(avoid=None)
            yield Started(self.sequence_id, self.request.model, self.request.sampling.seed, self.prompt_length)
            while self._finish_reason is None or self._answer.untold:
                self.inbox.rest()
                for event in self._answer.take():
                    yield event
                if self._finish_reason is None and not self._answer.untold:
                    await self._next()
            yield self._answer.finished(self._finish_reason, self.tally.summary, time.monotonic())
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._release()
            self._journal.ended(len(self.log) - self.prompt_length, self._finish_reason, self.tally.summary, error)

    def deliver(self, worker: Worker, result: AnyResult) -> None:
        """What finds nothing else to be dealt with is handled at once, in one pass over all that came with it."""
        settled = self.inbox.idle and self._finish_reason is None and not self._answer.waits_for_client
        if not (settled and self._handled(worker, result)):
            self.inbox.deliver(worker, result)

    def _handled(self, worker: Worker, result: AnyResult) -> bool:
        """False: nothing was done, since it may take time."""
        try:
            if isinstance(result, DraftResult):
                if not isinstance(result.body, DraftBlock):
                    return False
                self._on_draft(worker, result)
            elif not isinstance(result.body, Committed) or self._progress(worker, result, result.body):
                return False
        except Exception as error:  # this sequence's alone, not the link's that delivers
            self.inbox.end(error)
        if self._answer.untold or self._finish_reason is not None:
            self.inbox.look_up()  # and then it is waited for what comes next
        else:
            self.inbox.ring_by(self._late_at())
        return True

    def _late_at(self) -> float:
        return min(self._deadline, self._verifying.lost_at, self._drafting.due_at)

    async def _next(self) -> None:
        """Handles what comes next: a result, a lost worker, or the passing of a limit."""
        message = await self.inbox.next(self._late_at)
        if message is None:
            if self._finish_reason is None and not self._answer.untold:
                await self._passed(time.monotonic())
            return
        worker, result = message
        if result is None:
            await self._worker_lost(worker)
        elif isinstance(result, TargetResult):
            await self._on_target(worker, result)
        else:
            self._on_draft(worker, result)

    async def _passed(self, now: float) -> None:
        self._admission.check_deadline(now)
        if now >= self._verifying.lost_at:
            await self._fail_over(f"no progress for {self._config.round_timeout:g} s", avoid=True)
        elif now >= self._drafting.due_at:
            self._drafting.give_up_waiting()
            self._draft_failed("late", self._drafting.worker)

    async def _place(self, avoid: Worker | None, cause: str = "") -> None:
        """Opens the log on a live target under a new epoch, waiting for one as long as admission allows."""
        target = await self._admission.target(avoid)
        now = time.monotonic()
        self._verifying.raise_epoch()
        self._choose_drafter(target, now)
        self._control.serve_with(target, self._drafting.worker)
        self._control.restart()
        self._drafting.restart()
        drafter = self._drafting.worker
        # The drafter could not begin before the prefill has ended: nobody waits for it to say the first token.
        first_plainly = drafter is not None and drafter.takes_turns_with(target)
        decision = OFF if first_plainly else self._decide(now)
        waits = first_plainly or not (decision.off or decision.probe)
        self._verifying.open(target, self._drafting.patience() if waits else 0.0, now, first_plainly)
        self.opened_length = len(self.log)
        self._journal.placed(self._verifying.epoch.number, target, drafter, len(self.log), cause)
        if not decision.off:
            self._ask(decision, now)
        self._recorder.record(self.record())

    async def _fail_over(self, cause: str, avoid: bool = False) -> None:
        """The target is lost or will not go on: the log is opened on another, or again on the same."""
        worker = self._verifying.worker
        name = worker.name if worker else "?"
        _log.warning("sequence %s leaves target worker %s: %s", self.sequence_id, name, cause, extra=self._about)
        self._verifying.leave(time.monotonic())
        self.tally.fail_over()
        await self._place(worker if avoid else None, cause)

    async def _worker_lost(self, worker: Worker) -> None:
        if worker is self._drafting.worker:
            self._leave_drafter()
            self._draft_failed("failed", None)
        if worker is self._verifying.worker:
            await self._fail_over(worker.detail, avoid=True)

    async def _on_target(self, worker: Worker, result: TargetResult) -> None:
        body = result.body
        if isinstance(body, Committed):
            if problem := self._progress(worker, result, body):
                await self._fail_over(problem)
        elif not self._is_heard(worker, result, time.monotonic()):
            return
        elif isinstance(body, StaleBlock):
            self.tally.stale_block(result.header.prefix_digest)
        elif isinstance(body, Refusal):
            await self._refused(body)
        elif isinstance(body, Failure):
            raise SequenceFailed(f"the target worker failed on this sequence: {body.message}")
        elif isinstance(body, NeedTokens):
            await self._fail_over("it lacks tokens of the log")

    def _is_heard(self, worker: Worker, result: TargetResult, now: float) -> bool:
        """False for a late result of a worker that lost the sequence."""
        if worker is not self._verifying.worker or result.header.epoch != self._verifying.epoch:
            self.refused_results += 1
            return False
        self._verifying.heard(now)
        return True

    async def _refused(self, refusal: Refusal) -> None:
        if refusal.reason is RefusalReason.INVALID:
            if refusal.message.startswith(GRAMMAR_REFUSED):  # what only the tokenizer could tell
                raise InvalidRequest("grammar", refusal.message)
            raise SequenceFailed(f"the target worker refused the sequence: {refusal.message}")
        if refusal.reason is RefusalReason.EPOCH and refusal.held_epoch is not None:
            self._verifying.raise_epoch(refusal.held_epoch.number)
            await self._fail_over(refusal.message)
        elif refusal.reason is RefusalReason.CAPACITY:
            self._admission.no_room(refusal.message)
            await asyncio.sleep(0.1)
            await self._fail_over(refusal.message, avoid=True)
        else:
            await self._fail_over(refusal.message, avoid=refusal.reason is RefusalReason.DRAINING)

    def _progress(self, worker: Worker, result: TargetResult, body: Committed) -> str:
        """Appends what is new, streams it, and goes on with the next round. Or returns why the target is to be left,
        and does nothing."""
        now = time.monotonic()
        if not self._is_heard(worker, result, now):
            return ""
        base_length = result.header.base_length
        place = self.log.place(base_length, result.header.prefix_digest)
        if place is Place.BEYOND:  # an earlier answer is missing: have it told again
            self._verifying.step(self._drafting.patience(), now)
            return ""
        new = self._answer.new_part(base_length, body) if place is Place.HERE else None
        if new is None:
            return "its log is not the one that was streamed"
        if new.token_ids:
            self._append(new := self._answer.cut(new), now)
        if new.finish_reason is not None:
            self._finish_reason = new.finish_reason
        elif new.token_ids:
            self._continue(now)
        return ""

    def _append(self, body: Committed, now: float) -> None:
        position = self._answer.add(body, now)
        self.inbox.look_up()  # woken first, its reader writes the event before what is asked for below is sent
        self.tally.streamed(len(body.token_ids))
        self._control.committed(body, self._verifying.plain, now)
        self._admission.over()
        self._journal.committed(body, self.log, position, self._control.reason, now)
        self._recorder.record(self.record())

    def _continue(self, now: float) -> None:
        """After the log grew: asks for the next block, or lets the target go on plainly."""
        if self._drafting.worker is None and self._verifying.worker is not None:
            self._choose_drafter(self._verifying.worker, now)
        decision = self._decide(now)
        if decision.off or decision.probe:
            self._verifying.step_plainly(now)
        elif self._verifying.plain:
            self._verifying.step(self._drafting.patience(), now)
            return
        if not decision.off:
            self._ask(decision, now)

    def _decide(self, now: float) -> Decision:
        """What to ask for now; off: decode plainly."""
        if not self._drafting.available(now):
            return OFF
        decision = self._control.decide()
        if decision.off and not self._verifying.plain:
            self.tally.fall_back("low_acceptance")
        return decision

    def _ask(self, decision: Decision, now: float) -> None:
        """The target goes on meanwhile if this is a probe: nobody waits for it."""
        waits = not decision.probe and not self._control.covers
        self._journal.asked(now)
        self._drafting.ask(self._control.asked(decision), self._verifying.headers(now), now, waits)

    def _choose_drafter(self, target: Worker, now: float) -> None:
        """Attaches the least loaded drafter that fits, if speculation is wanted at all."""
        if self.request.speculation is Speculation.OFF or self._drafting.worker is not None:
            return
        drafter = self._pool.place_drafter(target)
        if drafter is not None:
            self._drafting.attach(drafter, self.sequence_id)
            self._control.serve_with(target, drafter)

    def _on_draft(self, worker: Worker, result: DraftResult) -> None:
        header, body = result.header, result.body
        if worker is not self._drafting.worker or header.epoch != self._verifying.epoch:
            self.refused_results += 1
            return
        now = time.monotonic()
        if isinstance(body, DraftBlock):
            self._block_arrived(header, body, now)
        elif isinstance(body, NeedTokens):
            self._drafting.tell_from(body.have_length)
            self._continue(now)
        elif isinstance(body, Refusal) and body.reason is RefusalReason.UNKNOWN_SEQUENCE:
            self._drafting.restart()
            self._continue(now)
        elif isinstance(body, (Refusal, Failure)):
            told = worker.name, self.sequence_id, body.message
            _log.warning("draft worker %s on sequence %s: %s", *told, extra=self._about)
            self._leave_drafter()
            self._draft_failed("failed", worker)

    def _block_arrived(self, header: Header, block: DraftBlock, now: float) -> None:
        """Forwards candidates to the target, which walks them down whatever it committed meanwhile, or holds them until
        its log is that long."""
        place = self.log.place(header.base_length, header.prefix_digest)
        if place is Place.STALE or (place is Place.BEYOND and not self._control.may_be_ahead):
            self.tally.stale_block()  # and what was asked for is still due
            return
        if place is Place.HERE and self._drafting.arrived(now, block):
            self._control.caught_up()
        try:  # a drafter must not end a request: what the target would refuse is not forwarded
            self._verifying.check(block.candidates)
        except InvalidCandidates as error:
            _log.warning("sequence %s: bad block from the draft worker: %s", self.sequence_id, error)
            self._draft_failed("failed", self._drafting.worker)
            return
        if not len(block.candidates):
            self._control.nothing_proposed()
            if header.base_length < len(self.log):
                return
        patience = 0.0 if self._verifying.plain else self._drafting.patience()
        self._verifying.forward(header, block.candidates, patience, now)
        if len(block.candidates):
            self._control.forwarded(header.base_length, header.prefix_digest, block.candidates, block.fan_out)
            self._journal.forwarded(header, block, self._drafting.worker, place is Place.BEYOND, now)

    def _draft_failed(self, reason: str, blamed: Worker | None) -> None:
        """No block will come for this round: the target goes on plainly. Failing twice leaves the worker alone."""
        now = time.monotonic()
        if blamed is not None:
            blamed.blame(reason, now, self._config)
        self.tally.fall_back(reason)
        self._verifying.step_plainly(now)

    def _leave_drafter(self) -> None:
        self._drafting.detach(self.sequence_id, self._verifying.headers(time.monotonic()))
        self._control.serve_with(self._verifying.worker, None)

    def _release(self) -> None:
        self.inbox.close()
        self._leave_drafter()
        self._verifying.leave(time.monotonic())
        self._control.close()
        self._recorder.forget(self.sequence_id)
