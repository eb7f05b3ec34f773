"""The audit: a share of the finished answers is decoded again without speculation and compared token by token.

Under `invariant` an answer is a function of request, seed and target model only, so any difference is a fault, unless
the token won by no more than the numeric noise that the target measured when it loaded its model: a *near-tie*. It runs
while a target has nothing else to do, and stops as soon as it has. The replay shares no KV with what was served, or a
wrong row would repeat itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from scheduler import counters as metrics
from scheduler.config import SchedulerConfig
from scheduler.counters import Counters
from scheduler.links import LinkError
from scheduler.plain_run import Interrupted, PlainRun, RunFailed
from scheduler.pool import Pool
from scheduler.request import Finished, GenerationRequest
from scheduler.worker import AnyResult, Worker
from specdec import digest
from specdec.commit import FinishReason
from specdec.log import Log
from specdec.messages import Identity
from specdec.params import AcceptRule, Report, SamplingParams, StopConditions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """share: of finished `invariant` answers, 0 is off. noise: by how much the gap of two logits of a row may move with
    its batch; None: what the targets measured. queue: answers that may wait. poll: seconds between looks for an idle
    target. timeout: seconds without progress that end a replay. log_content: token ids go into the log too."""

    share: float = 0.01
    noise: float | None = None
    queue: int = 16
    poll: float = 0.2
    timeout: float = 60.0
    log_content: bool = False


NO_AUDIT = AuditConfig(share=0.0)


@dataclass(frozen=True, slots=True)
class AuditCase:
    """One finished answer and all that it depends on. target_worker: where it ended. numeric_noise: as that one
    measured it. text_ended: a text-level stop cut it, which a replay cannot see, so it is compared up to there."""

    sequence_id: str
    request: GenerationRequest
    stop: StopConditions
    token_ids: tuple[int, ...]
    finished: Finished
    target_worker: str
    numeric_noise: float = 0.0

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.finish_reason

    @property
    def text_ended(self) -> bool:
        by_token = self.token_ids[-1] in self.stop.stop_token_ids
        return self.request.watcher is not None and self.finish_reason is FinishReason.STOP and not by_token

    @property
    def replay_stop(self) -> StopConditions:
        if not self.text_ended:
            return self.stop
        return replace(self.stop, max_length=self.stop.prompt_length + len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Difference:
    """position: in the answer, from 0. served, plain: the tokens there; None where that answer has ended. margin: by
    how much the plain one won; None where there is none."""

    position: int
    served: int | None
    plain: int | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """plain_token_ids: what the replay decoded, up to the difference. audited_on: the target worker that did. noise:
    the margin up to which it had been a near-tie."""

    case: AuditCase
    difference: Difference
    plain_token_ids: tuple[int, ...]
    audited_on: str
    noise: float


Sink = Callable[[Mismatch], str]
"""Keeps a mismatch; returns how to replay it, for the log. Called on a thread of its own."""


def ignore(mismatch: Mismatch) -> str:
    return "it was not kept: set audit_dir to be able to replay it"


def compare(
    case: AuditCase, plain: Sequence[int], margins: Sequence[float], finish_reason: FinishReason | None
) -> Difference | None:
    """The first difference between the served answer and what was decoded plainly so far; None if there is none yet.
    finish_reason: None while the replay goes on."""
    served = case.token_ids
    for position, pair in enumerate(zip(served, plain, strict=False)):
        if pair[0] != pair[1]:
            return Difference(position, *pair, margins[position])
    if len(plain) > len(served):
        return Difference(len(served), None, plain[len(served)], None)
    if finish_reason is None:
        return None
    if len(plain) < len(served):
        return Difference(len(plain), served[len(plain)], None, None)
    if finish_reason is not case.finish_reason and not case.text_ended:
        return Difference(len(served), None, None, None)
    return None


def largest_near_tie(gap_noise: float, sampling: SamplingParams) -> float:
    """The margin up to which a token may have won by noise alone, where the gap of two logits moves by up to
    `gap_noise`: a repetition penalty scales logits, and a margin in log p + g is one of logits over the temperature."""
    scale = max(sampling.repetition_penalty, 1.0 / sampling.repetition_penalty)
    return gap_noise * scale / (sampling.temperature or 1.0)


def is_near_tie(margin: float | None, noise: float) -> bool:
    """Without noise nothing is one, not even two equal logits: the lowest id wins everywhere. With it a margin may be
    exactly as large, since both are few rounding steps."""
    return margin is not None and noise > 0.0 and margin <= noise


class Auditor:
    """Used from the event loop. choose: uniform in [0, 1)."""

    def __init__(
        self,
        config: AuditConfig,
        scheduler: SchedulerConfig,
        pool: Pool,
        counters: Counters,
        on_mismatch: Sink,
        choose: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._pool = pool
        self._counters = counters
        self._on_mismatch = on_mismatch
        self._choose = choose
        self._waiting: deque[AuditCase] = deque()
        self._arrived = asyncio.Event()
        self._run: PlainRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    def start(self) -> None:
        if self._config.share > 0:
            self._task = asyncio.create_task(self._work(), name="audit")

    async def close(self) -> None:
        """Ends a running replay; what waits is forgotten."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def consider(
        self,
        sequence_id: str,
        request: GenerationRequest,
        stop: StopConditions,
        token_ids: tuple[int, ...],
        finished: Finished,
        target: Worker,
    ) -> None:
        """A finished answer; it may be chosen."""
        if self._task is None or not token_ids or request.sampling.accept_rule is not AcceptRule.INVARIANT:
            return
        if self._choose() >= self._config.share:
            return
        if len(self._waiting) >= self._config.queue:
            self._count("dropped")
            return
        noise = _noise_of(target)
        self._waiting.append(AuditCase(sequence_id, request, stop, token_ids, finished, target.name, noise))
        self._arrived.set()

    def make_way(self, target: Worker) -> None:
        """That target got work, or is lost."""
        if self._run is not None and self._run.target is target:
            self._run.interrupt()

    def deliver(self, worker: Worker, result: AnyResult) -> None:
        """A result that belongs to no sequence of the scheduler."""
        run = self._run
        if run is not None and run.target is worker and run.sequence_id == result.header.sequence_id:
            run.deliver(result)

    async def _work(self) -> None:
        while True:
            case, target = await self._next()
            try:
                await self._audit(case, target)
            except Exception:
                self._count("failed")
                _log.exception("the audit of sequence %s failed", case.sequence_id)
            finally:
                self._run = None

    async def _next(self) -> tuple[AuditCase, Worker]:
        """The first case whose model has an idle target, as soon as there is one."""
        while True:
            self._arrived.clear()
            for case in list(self._waiting):
                target = await self._idle_target(case.request.model)
                if target is not None:
                    self._waiting.remove(case)
                    return case, target
            if self._waiting:
                await asyncio.sleep(self._config.poll)
            else:
                await self._arrived.wait()

    async def _idle_target(self, model: str) -> Worker | None:
        """A target on which neither this scheduler nor another one has a sequence."""
        for target in self._pool.targets(model):
            try:
                if not target.sequences and not (await target.link.load()).sequences and not target.sequences:
                    return target
            except LinkError:
                continue
        return None

    async def _has_other_work(self, target: Worker) -> bool:
        """Besides the replay. Other schedulers are looked at every `poll` seconds."""
        now = time.monotonic()
        if target.sequences or now < self._looked_at + self._config.poll:
            return bool(target.sequences)
        self._looked_at = now
        try:
            return (await target.link.load()).sequences > 1
        except LinkError:
            return True

    async def _audit(self, case: AuditCase, target: Worker) -> None:
        noise = self._noise(case, target)
        run = self._run = self._plain_run(case, target, Report(margins=True, noise=noise))
        plain: list[int] = []
        margins: list[float] = []
        difference: Difference | None = None
        try:
            async with aclosing(run.committed(self._config.timeout)) as steps:
                async for step in steps:
                    plain += step.token_ids
                    margins += step.margins
                    difference = compare(case, plain, margins, step.finish_reason)
                    if difference is not None:
                        break
                    if step.finish_reason is None and await self._has_other_work(target):
                        raise Interrupted
        except Interrupted:
            self._count("abandoned")
            return
        except RunFailed as error:
            self._count("failed")
            _log.warning("sequence %s could not be audited on %s: %s", case.sequence_id, target.name, error)
            return
        if difference is None:
            self._count("equal")
        elif is_near_tie(difference.margin, noise):
            self._count("near_tie")
        else:
            await self._report(Mismatch(case, difference, tuple(plain), target.name, noise))

    def _noise(self, case: AuditCase, target: Worker) -> float:
        """For this answer, replayed on `target`: the noise of either may have decided a token."""
        measured = max(case.numeric_noise, _noise_of(target))
        return largest_near_tie(measured if self._config.noise is None else self._config.noise, case.request.sampling)

    def _plain_run(self, case: AuditCase, target: Worker, report: Report) -> PlainRun:
        if target.identity is None:
            raise ValueError(f"{target.address} has not said who it is")
        sequence_id, secret = secrets.token_hex(8), self._scheduler.secret
        # A root of its own: no prefix of it is found among the KV of the answers that were served.
        root = root_of(target.identity, secret, salt=f"audit {sequence_id}")
        log = Log(root, case.request.token_ids, secret)
        owner = self._scheduler.scheduler_id
        return PlainRun(sequence_id, owner, target, log, case.request.sampling, case.replay_stop, report)

    async def _report(self, mismatch: Mismatch) -> None:
        self._counters.add(metrics.AUDIT_MISMATCHES)
        advice = await asyncio.to_thread(self._on_mismatch, mismatch)
        _log.error("%s; %s", describe(mismatch), advice)
        self._count("mismatch")
        if self._config.log_content:
            case, difference = mismatch.case, mismatch.difference
            _log.error(
                "sequence %s: prompt %s, served %s, plain %s, %r",
                case.sequence_id,
                list(case.request.token_ids),
                list(case.token_ids),
                list(mismatch.plain_token_ids),
                (case.request.sampling, case.stop, difference),
            )

    def _count(self, outcome: str) -> None:
        self._counters.add(metrics.AUDITS, 1, outcome)


def describe(mismatch: Mismatch) -> str:
    """One line without anything that the user wrote or read."""
    case, difference = mismatch.case, mismatch.difference
    margin = "none" if difference.margin is None else f"{difference.margin:g}"
    return (
        f"audit: the answer of sequence {case.sequence_id} ({case.request.model}, target worker {case.target_worker}) "
        f"differs from plain decoding on {mismatch.audited_on} at token {difference.position} "
        f"of {len(case.token_ids)} behind a prompt of {case.stop.prompt_length}: "
        f"seed {case.request.sampling.seed}, temperature {case.request.sampling.temperature:g}, "
        f"margin {margin}, noise {mismatch.noise:g}"
    )


def _noise_of(target: Worker) -> float:
    return target.identity.numeric_noise if target.identity else 0.0


def root_of(identity: Identity, secret: bytes, salt: str = "") -> bytes:
    """Digest of the empty log on that model."""
    return digest.root_digest(secret, f"{identity.model_name}:{identity.vocabulary_sha256}:{identity.dtype}", salt)
