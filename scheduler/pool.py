"""The workers: reaching them, pairing drafters with targets, placing sequences."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from scheduler.config import SchedulerConfig
from scheduler.links import LinkError, LinkFactory
from scheduler.worker import AnyResult, Worker, WorkerState
from specdec.messages import PROTOCOL_VERSION, Identity, Role
from specdec.vocabulary import first_differing_digest, first_differing_run, fit

_QUIET_SECONDS = 10.0
"""How long a worker may stay out of reach before the log says so."""

_LET_GO_SECONDS = 0.2
"""Between two looks whether a removed worker still has sequences."""

_log = logging.getLogger(__name__)


class Pool:
    """`deliver(worker, results)` gets what workers send; `lost(worker)` is called when one breaks off."""

    def __init__(
        self,
        config: SchedulerConfig,
        make_link: LinkFactory,
        deliver: Callable[[Worker, Sequence[AnyResult]], None],
        lost: Callable[[Worker], None],
    ) -> None:
        self._config = config
        self._make_link = make_link
        self._deliver = deliver
        self._lost = lost
        self._workers: dict[str, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._letting_go: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def add(self, role: Role, address: str) -> None:
        """Connects in the background and keeps trying. A known address is only taken back into use."""
        known = self._workers.get(address)
        if known is not None:
            known.removed = False
            self._stay(address)
            if known.state is WorkerState.DRAINING:
                known.state = WorkerState.READY
            return
        worker = Worker(role, address, self._make_link(role, address))
        self._workers[address] = worker
        self._tasks[address] = asyncio.create_task(self._keep_connected(worker), name=f"worker {address}")

    def remove(self, address: str) -> None:
        """No new sequences; it is let go once the running ones have ended, or its stream has."""
        worker = self._workers.get(address)
        if worker is None:
            return
        worker.removed = True
        if worker.state is WorkerState.READY:
            worker.state = WorkerState.DRAINING
            self._letting_go[address] = asyncio.create_task(self._let_go(worker), name=f"let go {address}")
        elif worker.state is not WorkerState.DRAINING:
            self._discard(worker)

    def targets(self, model: str = "") -> list[Worker]:
        """Targets that serve `model` ("": any) and can take sequences now."""
        now = time.monotonic()
        return [w for w in self._workers.values() if w.role is Role.TARGET and w.available(now) and _serves(w, model)]

    def models(self) -> list[Identity]:
        """Identities of the known targets, one per model name; those that are lost for the moment included."""
        known = [w.identity for w in self._workers.values() if w.role is Role.TARGET and w.identity]
        return list({identity.model_name: identity for identity in known}.values())

    def place_target(self, model: str, avoid: Worker | None = None) -> Worker | None:
        """The least loaded target that serves `model`; `avoid` only if there is no other."""
        candidates = self.targets(model)
        return min(candidates, key=lambda w: (w is avoid, len(w.sequences)), default=None)

    async def wait_for_target(self, model: str, avoid: Worker | None, until: float) -> Worker | None:
        """As `place_target`, waiting for one until that monotonic time."""
        while (target := self.place_target(model, avoid)) is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            await self.wait_for_change(min(left, 0.5))
        return target

    def place_drafter(self, target: Worker) -> Worker | None:
        """The least loaded drafter that fits `target`."""
        now = time.monotonic()
        fitting = [w for w in self._workers.values() if w.role is Role.DRAFT and w.available(now) and _fits(w, target)]
        return min(fitting, key=lambda w: len(w.sequences), default=None)

    async def wait_for_change(self, timeout: float) -> None:
        """Until some worker became usable or unusable, at most `timeout` seconds."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._letting_go.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(w.link.close() for w in self._workers.values()), return_exceptions=True)

    async def _keep_connected(self, worker: Worker) -> None:
        """Connect, serve until the stream breaks, and again, with growing pauses while it fails."""
        delay = self._config.reconnect_delay
        failing_since, said = time.monotonic(), ""
        while not worker.removed:
            try:
                await self._connect_and_serve(worker)
                delay = self._config.reconnect_delay
                failing_since = time.monotonic()
            except LinkError as error:
                # A worker that is just starting is no news; one that stays away is, once.
                if time.monotonic() - failing_since > _QUIET_SECONDS and said != str(error):
                    if worker.identity is None and not said:
                        _log.info("still waiting for the %s worker at %s", worker.role.value, worker.address)
                    else:
                        _log.warning("%s worker cannot be used: %s", worker.role.value, error)
                    said = str(error)
                worker.state, worker.detail = WorkerState.LOST, str(error)
            await self._notify()
            await asyncio.sleep(delay)
            delay = min(delay * 2, self._config.max_reconnect_delay)
        self._discard(worker)

    async def _connect_and_serve(self, worker: Worker) -> None:
        identity = await worker.link.identify()
        problem = _problem(worker, identity)
        if problem:
            raise LinkError(problem)
        broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await worker.link.open(
            lambda results: self._deliver(worker, results),
            lambda cause: None if broken.done() else broken.set_result(cause),
        )
        worker.broken = broken
        worker.identity = identity
        worker.target_model.turns = worker.drafter_model.turns = identity.turns
        worker.state, worker.detail, worker.suspended_until = WorkerState.READY, "", 0.0
        worker.failures.clear()
        _log.info("%s worker %s is connected at %s", worker.role.value, worker.name, worker.address)
        await self._pair_drafters()
        await self._notify()
        cause = await broken
        if worker.removed:
            _log.info("%s worker %s is let go: %s", worker.role.value, worker.name, cause)
        else:
            _log.warning("%s worker %s is lost: %s", worker.role.value, worker.name, cause)
        worker.state, worker.detail = WorkerState.LOST, cause
        self._lost(worker)
        await worker.link.close()
        worker.link = self._make_link(worker.role, worker.address)

    async def _let_go(self, worker: Worker) -> None:
        """Sequences end without a word to the pool, so it looks; for as long as they run, at most."""
        while worker.removed and worker.sequences:  # noqa: ASYNC110
            await asyncio.sleep(_LET_GO_SECONDS)
        if worker.removed and worker.broken is not None and not worker.broken.done():
            worker.broken.set_result("it was removed and has nothing left")

    async def _pair_drafters(self) -> None:
        """Keeps drafters that fit no target out; looked at again whenever a worker connects, so that start order does
        not matter."""
        targets = [w for w in self._workers.values() if w.role is Role.TARGET and w.identity]
        for drafter in self.workers:
            if drafter.role is not Role.DRAFT or drafter.state not in (WorkerState.READY, WorkerState.REFUSED):
                continue
            if drafter.identity is None or not targets:
                continue
            if any(_fits(drafter, target) for target in targets):
                drafter.state, drafter.detail = WorkerState.READY, ""
            elif drafter.state is not WorkerState.REFUSED:
                reason = await _misfit(drafter, targets[0])
                drafter.state, drafter.detail = WorkerState.REFUSED, reason
                _log.error("draft worker %s is refused: %s", drafter.name, reason)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _stay(self, address: str) -> None:
        if (task := self._letting_go.pop(address, None)) is not None:
            task.cancel()

    def _discard(self, worker: Worker) -> None:
        self._workers.pop(worker.address, None)
        self._stay(worker.address)
        task = self._tasks.pop(worker.address, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()


def _problem(worker: Worker, identity: Identity) -> str:
    """Why the worker cannot be spoken to; empty if it can."""
    if identity.role is not worker.role:
        return f"it is a {identity.role.value} worker, expected a {worker.role.value} worker"
    if identity.protocol_version != PROTOCOL_VERSION:
        return f"it speaks protocol {identity.protocol_version}, this scheduler {PROTOCOL_VERSION}: upgrade one of them"
    return ""


def _serves(worker: Worker, model: str) -> bool:
    return worker.identity is not None and model in ("", worker.identity.model_name)


def _fits(drafter: Worker, target: Worker) -> bool:
    return drafter.identity is not None and target.identity is not None and fit(drafter.identity, target.identity).fits


async def _misfit(drafter: Worker, target: Worker) -> str:
    """Why a drafter does not fit, with both names and the first id that differs as far as the workers tell it."""
    if drafter.identity is None or target.identity is None:
        return "it has not said who it is"
    run = first_differing_run(drafter.identity, target.identity)
    differing = None
    if run is not None:
        try:
            digests = await asyncio.gather(drafter.link.id_digests(run), target.link.id_digests(run))
            differing = first_differing_digest(run, *digests)
        except LinkError:
            differing = None
    return fit(drafter.identity, target.identity, differing).reason
