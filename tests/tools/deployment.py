"""A whole system in one process: the real scheduler, the real workers, table models, no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from scheduler.audit import NO_AUDIT, AuditConfig, Sink, ignore
from scheduler.config import Policy, SchedulerConfig
from scheduler.counters import NO_COUNTERS, Counters
from scheduler.entries import Reader
from scheduler.request import Finished, GenerationRequest, Speculation, Started, Tokens
from scheduler.scheduler import Scheduler
from specdec.commit import FinishReason, TokenSource
from specdec.drafter import Drafter
from specdec.messages import DraftItem, DraftResult, Identity, TargetItem, TargetResult
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.history import RequestHistory
from tools.identities import draft_identity, target_identity, tokenizer_bundle
from tools.network import Endpoint, Network
from tools.process import SECRET
from tools.recorder import MemoryRecorder
from tools.table_model import TableModel
from tools.waiting import until


@dataclass(slots=True)
class Answer:
    """One request's stream, taken apart."""

    started: Started
    token_ids: list[int] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.finished.finish_reason if self.finished else None


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """One draft worker. identity None: a drafter without a model, which fits every target."""

    drafter: Drafter
    identity: Identity | None = None


def quick_config(draft_length: int = 4, policy: Policy = Policy.FIXED, width: int = 1) -> SchedulerConfig:
    """Reconnects quickly, speculates whatever the acceptance, and waits for every draft, so that a busy machine changes
    no count."""
    return SchedulerConfig(
        "scheduler-test",
        SECRET,
        policy=policy,
        draft_length=draft_length,
        width=width,
        round_timeout=5.0,
        draft_timeout=5.0,
        min_draft_patience=5.0,
        admission_timeout=5.0,
        reconnect_delay=0.01,
        max_reconnect_delay=0.05,
        suspend_time=0.1,
    )


class SystemUnderTest:
    """A running scheduler, and how tests talk to it."""

    def __init__(self, scheduler: Scheduler, recorder: MemoryRecorder) -> None:
        self.scheduler = scheduler
        self.recorder = recorder

    async def settled(self) -> bool:
        return all(view.state in ("ready", "refused") for view in await self.scheduler.workers())

    async def state_of(self, address: str) -> str:
        return next((view.state for view in await self.scheduler.workers() if view.address == address), "unknown")

    async def generate(self, request: GenerationRequest, history: RequestHistory | None = None) -> Answer:
        """The whole stream, written down in `history` too. Raises what the stream raises."""
        history = history or RequestHistory("")
        answer: Answer | None = None
        async for event in self.scheduler.generate(request):
            history.see(event)
            match event:
                case Started():
                    answer = Answer(event)
                case Tokens() if answer:
                    answer.token_ids += event.token_ids
                    answer.sources += event.sources
                case Finished() if answer:
                    answer.finished = event
        if answer is None:
            raise RuntimeError("the stream ended without any event")
        return answer

    async def plain(self, request: GenerationRequest) -> Answer:
        """The same request without speculation: the reference of every equality."""
        return await self.generate(replace(request, speculation=Speculation.OFF))


class Deployment(SystemUnderTest):
    """Async context manager. Addresses are "target-0", "target-1", ..., "draft-0", ..."""

    def __init__(
        self,
        models: Sequence[TableModel],
        drafts: Sequence[Drafter | DraftSpec] = (),
        config: SchedulerConfig | None = None,
        target_config: TargetConfig | None = None,
        draft_config: DraftConfig | None = None,
        counters: Counters = NO_COUNTERS,
        audit: AuditConfig = NO_AUDIT,
        on_mismatch: Sink = ignore,
        readers: Sequence[Reader] = (),
    ) -> None:
        self.models = list(models)
        self.network = Network()
        recorder = MemoryRecorder()
        scheduler = Scheduler(
            config or quick_config(), self.network.make_link, recorder, counters, audit, on_mismatch, readers
        )
        super().__init__(scheduler, recorder)
        self.targets: list[Endpoint[TargetItem, TargetResult]] = []
        self.drafts: list[Endpoint[DraftItem, DraftResult]] = []
        self._target_config = target_config or TargetConfig("target", SECRET)
        self._draft_config = draft_config or DraftConfig("draft", SECRET)
        self._specs = [draft if isinstance(draft, DraftSpec) else DraftSpec(draft) for draft in drafts]
        self._workers: list[TargetWorker | DraftWorker] = []

    async def __aenter__(self) -> Deployment:
        for model in self.models:
            self.add_target(model)
        for spec in self._specs:
            self.add_draft(spec)
        await self.scheduler.start()
        for address, endpoint in self.network.endpoints.items():
            self.scheduler.add_worker(endpoint.worker.identity.role, address)
        if self.network.endpoints:
            await until(self.settled, "every worker is ready or refused")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for endpoint in self.network.endpoints.values():
            endpoint.thaw()
        await self.scheduler.close()
        for worker in self._workers:
            await asyncio.to_thread(worker.stop)

    def new_target_worker(self, model: TableModel, worker_id: str) -> TargetWorker:
        """A started target worker that ends with the deployment."""
        identity = target_identity(worker_id, model.vocabulary_size, model.context_length, model.name)
        identity = replace(identity, numeric_noise=model.numeric_noise)
        worker = TargetWorker(replace(self._target_config, worker_id=worker_id), model, identity)
        self._workers.append(worker)
        worker.start()
        return worker

    def new_draft_worker(self, spec: DraftSpec, worker_id: str) -> DraftWorker:
        """A started draft worker that ends with the deployment."""
        identity = spec.identity or draft_identity(worker_id, drafter=spec.drafter.name)
        worker = DraftWorker(
            replace(self._draft_config, worker_id=worker_id), spec.drafter, replace(identity, worker_id=worker_id)
        )
        self._workers.append(worker)
        worker.start()
        return worker

    def add_target(self, model: TableModel) -> Endpoint[TargetItem, TargetResult]:
        address = f"target-{len(self.targets)}"
        worker = self.new_target_worker(model, address)
        endpoint: Endpoint[TargetItem, TargetResult] = Endpoint(address, worker, tokenizer_bundle(worker.identity))
        self.targets.append(endpoint)
        self.network.add(endpoint)
        return endpoint

    def add_draft(self, spec: DraftSpec) -> Endpoint[DraftItem, DraftResult]:
        address = f"draft-{len(self.drafts)}"
        endpoint: Endpoint[DraftItem, DraftResult] = Endpoint(address, self.new_draft_worker(spec, address))
        self.drafts.append(endpoint)
        self.network.add(endpoint)
        return endpoint

    async def idle(self) -> None:
        """Until nothing of any request is left anywhere. Raises TimeoutError with what is."""

        def left() -> str:
            loads = [(e.address, e.worker.load()) for e in self.network.endpoints.values() if e.reachable]
            parts = [f"{address}: {load}" for address, load in loads if load.sequences or load.kv_blocks_used]
            if self.scheduler.active_sequences():
                parts.append(f"{self.scheduler.active_sequences()} in the scheduler")
            return "; ".join(parts)

        try:
            await until(lambda: not left(), "idle")
        except TimeoutError:
            raise TimeoutError(f"not idle: {left()}") from None
