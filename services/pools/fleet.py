"""The workers of a deployment over its life: replaced one by one, and more or fewer of them as demand goes."""

from __future__ import annotations

import asyncio
import time

from outrider.v1 import control_service_pb2 as control
from outrider.v1 import types_pb2 as types
from services.deployment import Deployment, another
from services.pools.pool import OnLine, Pool
from services.pools.scaling import Demand, RoleScaler
from services.pools.worker import WorkerSpec
from services.status_probe import StatusProbe

LOOK_SECONDS = 1.0
POLL_SECONDS = 0.1
GONE_SECONDS = 10.0
ROOM_SECONDS = 15.0
"""How long another worker may wait for room before the one that it replaces makes some."""


class Fleet:
    """Changes one worker at a time, in whichever pool they are."""

    def __init__(
        self, deployment: Deployment, pool: Pool, probe: StatusProbe, say: OnLine, start_timeout: float
    ) -> None:
        """start_timeout: seconds that a new worker gets to serve."""
        self._deployment, self._pool, self._probe, self._say = deployment, pool, probe, say
        self._start_timeout = start_timeout
        self._workers = {worker.name: worker for worker in deployment.workers}
        self._numbers = {"target": len(deployment.targets), "draft": len(deployment.drafts)}
        self._lock = asyncio.Lock()

    async def replace_all(self) -> None:
        """A new worker for each, one after the other; no request fails."""
        async with self._lock:
            for worker in list(self._workers.values()):
                if not await self._replace(worker):
                    self._say(worker.name, "the replacement does not serve: the others stay as they are")
                    return

    async def scale(self) -> None:
        """For ever: as many workers as demand asks for, within the bounds of each role."""
        bounds = {"target": self._deployment.target_bounds, "draft": self._deployment.draft_bounds}
        scalers = {role: RoleScaler(bound) for role, bound in bounds.items() if bound is not None}
        meter = Meter()
        while scalers:
            await asyncio.sleep(LOOK_SECONDS)
            status = await self._probe.ask()
            if status is None:
                continue
            now = time.monotonic()
            demands = meter.read(status, now)
            for role, scaler in scalers.items():
                await self._go_to(role, scaler.wanted(demands[role], now))

    async def _go_to(self, role: str, wanted: int) -> None:
        async with self._lock:
            present = [worker for worker in self._workers.values() if worker.settings.section == role]
            if wanted > len(present):
                worker = self._next(present[0])
                self._say(worker.name, f"starts: {wanted} {role} workers are needed")
                await self._start(worker)
            elif wanted < len(present):
                self._say(present[-1].name, f"ends: {wanted} {role} workers are enough")
                await self._end(present[-1])

    async def _replace(self, worker: WorkerSpec) -> bool:
        """False if the new one does not serve."""
        if not self._deployment.by_lease:  # its address is what the scheduler knows it by
            self._say(worker.name, "drains, and starts anew")
            await self._end(worker)
            return bool(await self._start(worker))
        new = self._next(worker)
        self._say(worker.name, f"is replaced by {new.name}")
        served = await self._start(new)
        if served is None:
            self._say(worker.name, f"drains first: nowhere is room for {new.name} beside it")
            await self._end(worker)
            return bool(await self._start(new))
        if served:
            await self._end(worker)
        return bool(served)

    def _next(self, worker: WorkerSpec) -> WorkerSpec:
        role = worker.settings.section
        self._numbers[role] += 1
        return another(worker, self._numbers[role])

    async def _start(self, worker: WorkerSpec) -> bool | None:
        """Whether it came to serve; None if there is no room for it."""
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                await self._pool.add(worker)
        except TimeoutError:
            return None
        self._workers[worker.name] = worker
        return await self._until(worker, serves=True, seconds=self._start_timeout)

    async def _end(self, worker: WorkerSpec) -> None:
        del self._workers[worker.name]
        await self._pool.remove(worker.name, worker.settings.drain_timeout)
        await self._until(worker, serves=False, seconds=GONE_SECONDS)

    async def _until(self, worker: WorkerSpec, serves: bool, seconds: float) -> bool:
        """Waits until the scheduler sees it serve, or no longer. False after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while serving(await self._probe.ask(), worker) is not serves:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            return False
        return True


def serving(status: control.GetStatusResponse | None, worker: WorkerSpec) -> bool:
    """Whether the scheduler can use that worker."""
    if status is None:
        return False
    return any(
        seen.state == control.WORKER_STATE_READY
        and (seen.address == worker.settings.listen or seen.identity.worker_id == worker.name)
        for seen in status.workers
    )


class Meter:
    """Reads demand from what the scheduler tells of its workers."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._at = 0.0

    def read(self, status: control.GetStatusResponse, now: float) -> dict[str, Demand]:
        """By role. Goodput is that since the last reading: what targets committed."""
        targets = [seen for seen in status.workers if _is(seen, types.WORKER_ROLE_TARGET)]
        drafts = [seen for seen in status.workers if _is(seen, types.WORKER_ROLE_DRAFT)]
        goodput = self._goodput({seen.address: seen.load.tokens for seen in targets}, now)
        at_drafts = sum(seen.load.sequences for seen in drafts)
        return {
            "target": Demand(len(targets), status.active_sequences, goodput),
            "draft": Demand(len(drafts), at_drafts, goodput),
        }

    def _goodput(self, tokens: dict[str, int], now: float) -> float:
        grown = sum(max(count - self._tokens.get(address, count), 0) for address, count in tokens.items())
        seconds, self._at, self._tokens = now - self._at, now, tokens
        return grown / seconds if seconds > 0 else 0.0


def _is(seen: control.WorkerStatus, role: types.WorkerRole.ValueType) -> bool:
    return seen.state == control.WORKER_STATE_READY and seen.identity.role == role
