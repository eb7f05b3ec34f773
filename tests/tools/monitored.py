"""A whole deployment of table models in one process, over real sockets, with the metrics of every role served."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import httpx2

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from scheduler import counters
from scheduler.audit import NO_AUDIT, AuditConfig
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from services.links import link_factory
from services.metrics import role_metrics
from services.telemetry.metrics import Metrics
from services.telemetry.metrics_exposition import Exposition, metrics_endpoint
from services.telemetry.metrics_process import watch_draft, watch_scheduler, watch_target
from services.worker_process import ServeOptions, serve_draft, serve_target
from specdec.drafter import Drafter
from specdec.messages import Role
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.deployment import SystemUnderTest, quick_config
from tools.exposition import value
from tools.identities import draft_identity, target_identity, tokenizer_bundle
from tools.process import SECRET
from tools.proxy import FaultProxy
from tools.recorder import MemoryRecorder
from tools.served_http import served_http
from tools.table_model import TableModel
from tools.waiting import until


class Monitored(SystemUnderTest):
    """Async context manager. The scheduler reaches every worker through a proxy: `targets`, `drafts`, in order.

    drafters: by the kind that they say they are; the scheduler knows the first alone until it is told of another one.
    urls: of the metrics, by process. metadata_state: what the scheduler tells of Redis.
    """

    def __init__(
        self,
        models: Sequence[TableModel],
        drafters: Sequence[tuple[str, Drafter]],
        config: SchedulerConfig | None = None,
        target_config: TargetConfig | None = None,
        draft_config: DraftConfig | None = None,
        audit: AuditConfig = NO_AUDIT,
    ) -> None:
        self.metrics = role_metrics("scheduler")
        recorder = MemoryRecorder()
        links = link_factory(counters=self.metrics)
        super().__init__(Scheduler(config or quick_config(), links, recorder, self.metrics, audit), recorder)
        watch_scheduler(self.metrics, self.scheduler, lambda: self.metadata_state)
        self.metadata_state = "connected"
        self.urls: dict[str, str] = {}
        self.of: dict[str, Metrics] = {}
        """Those of the workers, by name."""
        self.targets: list[FaultProxy] = []
        self.drafts: list[FaultProxy] = []
        self._models = list(models)
        self._drafters = list(drafters)
        self._target_config = target_config or TargetConfig("target", SECRET)
        self._draft_config = draft_config or DraftConfig("draft", SECRET)
        self._folder = Path(tempfile.mkdtemp(prefix="ot", dir="/tmp"))
        self._exits = AsyncExitStack()
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Monitored:
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def audited(self) -> int:
        """Answers that were compared."""
        return round(sum(value(self.metrics, counters.AUDITS, how) for how in ("equal", "near_tie", "mismatch")))

    @property
    def mismatches(self) -> int:
        return round(value(self.metrics, counters.AUDIT_MISMATCHES))

    async def shown(self, name: str) -> str:
        """What the process shows at `/metrics`."""
        async with httpx2.AsyncClient(trust_env=False) as client:
            return (await client.get(self.urls[name])).text

    async def _start(self) -> None:
        url = await self._exits.enter_async_context(
            served_http(self.scheduler, render_metrics=Exposition(self.metrics).render)
        )
        self.urls["scheduler"] = f"{url}/metrics"
        await self.scheduler.start()
        for index, model in enumerate(self._models):
            self.targets.append(await self._target(f"target-{index}", model))
        for index, (kind, drafter) in enumerate(self._drafters):
            self.drafts.append(await self._draft(f"draft-{index}", kind, drafter))
        for proxy in self.targets:
            self.scheduler.add_worker(Role.TARGET, proxy.address)
        for proxy in self.drafts[:1]:
            self.scheduler.add_worker(Role.DRAFT, proxy.address)
        await until(self.settled, "every worker is ready")

    async def _target(self, name: str, model: TableModel) -> FaultProxy:
        metrics = self.of[name] = role_metrics("target")
        identity = target_identity(name, model.vocabulary_size, model.context_length, model.name)
        config = replace(self._target_config, worker_id=name)
        worker = TargetWorker(config, model, identity, counters=metrics)
        watch_target(metrics, worker.load)
        self.urls[name] = self._exits.enter_context(metrics_endpoint(metrics, "127.0.0.1", 0))
        ready: asyncio.Queue[str] = asyncio.Queue()
        serving = serve_target(
            worker,
            tokenizer_bundle(identity),
            f"unix:{self._folder}/{name}",
            on_ready=ready.put,
            options=ServeOptions(grace=0.0),
            stop=self._stop,
        )
        return await self._served(serving, ready)

    async def _draft(self, name: str, kind: str, drafter: Drafter) -> FaultProxy:
        metrics = self.of[name] = role_metrics("draft")
        identity = draft_identity(name, drafter=kind)
        config = replace(self._draft_config, worker_id=name)
        worker = DraftWorker(config, drafter, identity, counters=metrics)
        watch_draft(metrics, worker.load, identity)
        self.urls[name] = self._exits.enter_context(metrics_endpoint(metrics, "127.0.0.1", 0))
        ready: asyncio.Queue[str] = asyncio.Queue()
        options = ServeOptions(grace=0.0)
        listen = f"unix:{self._folder}/{name}"
        serving = serve_draft(worker, listen, on_ready=ready.put, options=options, stop=self._stop)
        return await self._served(serving, ready)

    async def _served(self, serving: Coroutine[None, None, None], ready: asyncio.Queue[str]) -> FaultProxy:
        task = asyncio.create_task(serving)

        async def ended() -> None:
            self._stop.set()
            await task

        self._exits.push_async_callback(ended)
        return await self._exits.enter_async_context(FaultProxy(await ready.get()))

    async def _close(self) -> None:
        await self.scheduler.close()
        await self._exits.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)
