"""A real model in one target worker of this process, shared by as many schedulers as a test needs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler
from specdec.drafter import Drafter
from specdec.engine.loading import load
from specdec.engine.runner import ModelRunner
from specdec.messages import DraftItem, DraftResult, Identity, Role, TargetItem, TargetResult
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.deployment import SystemUnderTest, quick_config
from tools.identities import draft_identity
from tools.network import Endpoint, Network
from tools.process import SECRET
from tools.recorder import MemoryRecorder
from tools.waiting import until

DTYPES = ("bf16", "fp32")
THREADS = 2
PATIENCE = 120.0
"""Seconds. A step over hundreds of rows takes a second on a busy machine, and turns make a sequence wait for many."""


@lru_cache
def real_runner(folder: Path, dtype: str) -> ModelRunner:
    """Loaded once per test run."""
    return load(folder, dtype=dtype, threads=THREADS)


def patient_config(scheduler_id: str = "scheduler-test", draft_length: int = 4) -> SchedulerConfig:
    """Policy `fixed`, and nobody counts as late."""
    return replace(
        quick_config(draft_length),
        scheduler_id=scheduler_id,
        round_timeout=PATIENCE,
        draft_timeout=PATIENCE,
        min_draft_patience=PATIENCE,
        admission_timeout=PATIENCE,
    )


class RealSystem(SystemUnderTest):
    """One scheduler of a `RealTarget`; its endpoints remember what was said."""

    def __init__(self, worker: TargetWorker, draft: DraftWorker | None, scheduler_id: str) -> None:
        network, recorder = Network(), MemoryRecorder()
        super().__init__(Scheduler(patient_config(scheduler_id), network.make_link, recorder), recorder)
        self.target: Endpoint[TargetItem, TargetResult] = Endpoint("target", worker)
        network.add(self.target)
        self.draft: Endpoint[DraftItem, DraftResult] | None = None
        if draft is not None:
            self.draft = Endpoint("draft", draft)
            network.add(self.draft)
        self.network = network

    async def connect(self) -> None:
        for address, endpoint in self.network.endpoints.items():
            self.scheduler.add_worker(endpoint.worker.identity.role, address)
        await until(self.settled, "every worker is ready")


class RealTarget:
    """Async context manager: the target worker. `system` adds a scheduler with a draft worker of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        identity = Identity(
            "target",
            Role.TARGET,
            runner.name,
            runner.vocabulary_size,
            "sha256 of the vocabulary",
            context_length=runner.context_length,
            dtype=runner.dtype,
        )
        self.runner = runner
        self.worker = TargetWorker(TargetConfig("target", SECRET, max_sequences=1024), runner, identity)
        self._systems: list[RealSystem] = []
        self._drafts: list[DraftWorker] = []

    async def __aenter__(self) -> RealTarget:
        self.worker.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for system in self._systems:
            await system.scheduler.close()
        for draft in self._drafts:
            await asyncio.to_thread(draft.stop)
        await asyncio.to_thread(self.worker.stop)

    async def system(self, drafter: Drafter | None = None) -> RealSystem:
        """A connected scheduler; without a drafter it decodes plainly."""
        number = len(self._systems)
        draft: DraftWorker | None = None
        if drafter is not None:
            config = DraftConfig(f"draft-{number}", SECRET)
            draft = DraftWorker(config, drafter, draft_identity(config.worker_id, drafter=drafter.name))
            draft.start()
            self._drafts.append(draft)
        system = RealSystem(self.worker, draft, f"scheduler-{number}")
        self._systems.append(system)
        await system.connect()
        return system
