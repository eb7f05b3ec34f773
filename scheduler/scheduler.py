"""The scheduler: owns the sequences' logs and is the only one who streams them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler import counters as metrics
from scheduler.audit import NO_AUDIT, AuditConfig, Auditor, Sink, ignore, root_of
from scheduler.config import Policy, SchedulerConfig
from scheduler.counters import NO_COUNTERS, Counters, Metric
from scheduler.driver import Driver
from scheduler.entries import Reader
from scheduler.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from scheduler.gauges import read_gauges
from scheduler.links import LinkError, LinkFactory, Recorder, SequenceRecord, TargetLink
from scheduler.pool import Pool
from scheduler.request import Event, Finished, GenerationRequest, Speculation, Started, Tokens
from scheduler.steps import target_steps
from scheduler.tally import RequestTimes
from scheduler.worker import AnyResult, Worker, WorkerState
from specdec.draft_length import FixedPolicy, ThresholdPolicy
from specdec.goodput import Explained
from specdec.goodput_policy import GoodputPolicy, Limits
from specdec.log import Log
from specdec.messages import Identity, Load, Role, TokenizerBundle
from specdec.metric import Readings
from specdec.params import StopConditions
from specdec.policy import SpeculationPolicy, Standing

_EXPLAINED_SEQUENCES = 32
"""Ended sequences whose decisions are remembered."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as `outrider status` shows it. state: connecting, ready, refused, suspended, lost, draining."""

    address: str
    role: Role
    state: str
    detail: str
    identity: Identity | None
    load: Load | None


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        make_link: LinkFactory,
        recorder: Recorder,
        counters: Counters = NO_COUNTERS,
        audit: AuditConfig = NO_AUDIT,
        on_mismatch: Sink = ignore,
        readers: Sequence[Reader] = (),
    ) -> None:
        """readers: read the journal of every sequence."""
        self._config = config
        self._recorder = recorder
        self._counters = counters
        self._readers = tuple(readers)
        self._pool = Pool(config, make_link, self._deliver, self._lost)
        self._auditor = Auditor(audit, config, self._pool, counters, on_mismatch)
        self._drivers: dict[str, Driver] = {}
        self._ended: OrderedDict[str, Sequence[Explained]] = OrderedDict()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.refused_results = 0
        """Results that came from a worker which had lost the sequence, or under an old epoch."""

    async def start(self) -> None:
        self._auditor.start()

    def add_worker(self, role: Role, address: str) -> None:
        """From discovery or a static list: connects in the background and keeps trying. Known addresses are ignored."""
        self._pool.add(role, address)

    def remove_worker(self, address: str) -> None:
        """Its lease expired or it drains: no new sequences; running ones move elsewhere when it is lost."""
        self._pool.remove(address)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Started, Tokens..., Finished; or raises a RequestError. Closing the iterator cancels the sequence."""
        with RequestTimes(self._counters, request.traceparent) as times:
            driver = self._admit(request)
            self._drivers[driver.sequence_id] = driver
            self._idle.clear()
            events = driver.events()
            try:
                async for event in events:
                    times.saw(event)
                    if not isinstance(event, Tokens):
                        self._audit(driver, event)
                    yield event
            finally:
                await events.aclose()
                self.refused_results += driver.refused_results
                del self._drivers[driver.sequence_id]
                self._remember(driver)
                if not self._drivers:
                    self._idle.set()

    @property
    def ready(self) -> bool:
        """A live target."""
        return not self._draining and bool(self._pool.targets())

    def models(self) -> Sequence[Identity]:
        """Identities of the known targets, one per model name; those that are lost for the moment included."""
        return self._pool.models()

    async def tokenizer(self, model: str) -> TokenizerBundle:
        """From any ready target of that model ("": the only one). Raises ModelNotFound, Unavailable."""
        name = self._model(model).model_name
        problem = "it is gone"
        for worker in self._pool.targets(name):
            link: TargetLink = worker.link  # type: ignore[assignment]  # the pool holds target links for targets
            try:
                return await link.tokenizer()
            except LinkError as error:
                problem = str(error)
        raise Unavailable(f"no target worker gave the tokenizer of {name}: {problem}")

    async def workers(self) -> list[WorkerView]:
        return list(await asyncio.gather(*(self._view(worker) for worker in self._pool.workers)))

    def sequences(self) -> list[SequenceRecord]:
        """The running sequences, oldest first."""
        return [driver.record() for driver in self._drivers.values()]

    def explained(self, sequence_id: str) -> Sequence[Explained]:
        """The latest decisions for a sequence that runs or ended lately, oldest first; empty if none are known."""
        driver = self._drivers.get(sequence_id)
        return driver.explained() if driver else self._ended.get(sequence_id, ())

    def gauges(self) -> Mapping[Metric, Readings]:
        """How things are now."""
        return read_gauges(self._drivers.values(), self._pool.workers)

    def active_sequences(self) -> int:
        return len(self._drivers)

    async def drain(self, timeout: float) -> None:
        """Takes no new sequences (they are refused with Unavailable) and waits for the running ones."""
        self._draining = True
        await self._auditor.close()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Ends what still runs with Unavailable, and every link."""
        self._draining = True
        for driver in self._drivers.values():
            driver.inbox.end(Unavailable("this scheduler has ended"))
        await self._auditor.close()
        await self._pool.close()

    def _deliver(self, worker: Worker, results: Sequence[AnyResult]) -> None:
        if worker.role is Role.TARGET:
            for step in target_steps(results, self._drivers):
                worker.target_model.observe(step)
        for result in results:
            driver = self._drivers.get(result.header.sequence_id)
            if driver is not None:
                driver.deliver(worker, result)
            else:
                self._auditor.deliver(worker, result)

    def _remember(self, driver: Driver) -> None:
        explained = driver.explained()
        if explained:
            self._ended[driver.sequence_id] = explained
            if len(self._ended) > _EXPLAINED_SEQUENCES:
                self._ended.popitem(last=False)

    def _audit(self, driver: Driver, event: Event) -> None:
        if isinstance(event, Started) and driver.target is not None:
            self._auditor.make_way(driver.target)
        elif isinstance(event, Finished) and driver.target is not None:
            answer = tuple(driver.log.since(driver.prompt_length))
            self._auditor.consider(driver.sequence_id, driver.request, driver.stop, answer, event, driver.target)

    def _lost(self, worker: Worker) -> None:
        self._counters.add(metrics.LOST_STREAMS, 1, worker.role.value)
        self._auditor.make_way(worker)
        for sequence_id in list(worker.sequences):
            driver = self._drivers.get(sequence_id)
            if driver is not None:
                driver.inbox.lost(worker)

    async def _view(self, worker: Worker) -> WorkerView:
        load: Load | None = None
        if worker.state in (WorkerState.READY, WorkerState.DRAINING):
            try:
                load = await worker.link.load()
            except LinkError:
                load = None
        state = worker.shown_state(time.monotonic())
        detail = worker.detail if state is not WorkerState.READY else ""
        return WorkerView(worker.address, worker.role, state.value, detail, worker.identity, load)

    def _model(self, model: str) -> Identity:
        models = self._pool.models()
        if model:
            served = next((m for m in models if m.model_name == model), None)
            if served is not None:
                return served
            if models:
                names = ", ".join(sorted(m.model_name for m in models))
                raise ModelNotFound(f"model {model} is not served; served: {names}")
        if not models:
            raise Unavailable("no live target worker")
        if len(models) > 1:
            names = ", ".join(sorted(m.model_name for m in models))
            raise InvalidRequest("model", f"model is empty but several are served: {names}")
        return models[0]

    def _admit(self, request: GenerationRequest) -> Driver:
        """Checks the request against the served model and makes its driver. Raises a RequestError."""
        if self._draining:
            raise Unavailable("this scheduler is draining")
        if len(self._drivers) >= self._config.max_sequences:
            raise Overloaded(f"{len(self._drivers)} sequences are running, the limit is {self._config.max_sequences}")
        identity = self._model(request.model)
        request = replace(request, model=identity.model_name)
        stop = _stop_conditions(request, identity)
        log = Log(root_of(identity, self._config.secret), request.token_ids, self._config.secret)
        return Driver(
            self._config,
            self._pool,
            self._recorder,
            request,
            secrets.token_hex(8),
            log,
            stop,
            self._policy(request),
            self._counters,
            self._readers,
        )

    def _policy(self, request: GenerationRequest) -> SpeculationPolicy:
        config = self._config
        length = config.draft_length if request.draft_length is None else request.draft_length
        if request.speculation is Speculation.ON or config.policy is Policy.FIXED:
            return Standing(FixedPolicy(min(length, config.max_draft_length)), config.width, config.window)
        if config.policy is Policy.GOODPUT:
            limits = Limits(length, config.max_draft_length, config.width, config.max_window, config.draft_timeout / 2)
            return GoodputPolicy(limits)
        threshold = ThresholdPolicy(
            length, config.max_draft_length, config.acceptance_window, config.off_below, config.probe_after_tokens
        )
        return Standing(threshold, config.width, config.window)


def _stop_conditions(request: GenerationRequest, identity: Identity) -> StopConditions:
    """Absolute lengths from the request's counts. Raises InvalidRequest."""
    length, context = len(request.token_ids), identity.context_length
    if not length:
        raise InvalidRequest("prompt", "the prompt is empty, at least one token is needed")
    if length >= context:
        raise InvalidRequest(
            "prompt", f"the prompt has {length} tokens, must be less than the context of {context} tokens"
        )
    wrong = next((t for t in request.token_ids if not 0 <= t < identity.vocabulary_size), None)
    if wrong is not None:
        raise InvalidRequest("prompt", f"token id {wrong} must be in [0, {identity.vocabulary_size})")
    room = context - length
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if not 1 <= max_tokens <= room:
        raise InvalidRequest(
            "max_tokens", f"max_tokens is {max_tokens}, must be in [1, {room}]: context {context}, prompt {length}"
        )
    if not 0 <= request.min_tokens <= max_tokens:
        raise InvalidRequest("min_tokens", f"min_tokens is {request.min_tokens}, must be in [0, {max_tokens}]")
    try:
        request.sampling.validate()
    except ValueError as error:
        raise InvalidRequest(str(error).split(" ", 1)[0], str(error)) from None
    return StopConditions(length, length + max_tokens, length + request.min_tokens, request.stop_token_ids)
