"""`outrider up`: starts a deployment on this machine, keeps it running, and ends it without leaving anything behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.v1 import control_service_pb2 as control
from services.deployment import SCHEDULER, Api, Deployment, child_spec
from services.output import LAUNCHER, Output
from services.pools.fleet import Fleet
from services.pools.local import LocalPool
from services.pools.pool import Pool
from services.start_error import ExitCode, StartError
from services.status_probe import StatusProbe
from services.supervisor import ChildFailed, Supervisor

POLL_SECONDS = 0.1
TOLD_SECONDS = 5.0
"""Between two lines about what is not ready yet."""
WORKER_SECONDS = 5.0
"""What workers get to end: by then the scheduler has drained."""
EXTRA_SECONDS = 2.0

Session = Callable[[str], Awaitable[None]]
"""What is done with a deployment that serves at this address; when it returns the deployment ends."""


def free_port(host: str, port: int, api: Api) -> int:
    """`port` if nobody listens there, some free one if it is 0. Raises StartError that names the flag of this API."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartError(f"{api.value}_host {host!r} is no address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            raise StartError(
                f"port {port} on {host} is taken ({os.strerror(error.errno or 0)}): "
                f"choose another one with --{api.value}-port"
            ) from error
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: the first asks for a quiet end, the second for one at once."""

    first: asyncio.Event
    forced: bool = False

    @contextmanager
    def handled(self, force: Callable[[], None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if self.first.is_set():
                self.forced = True
                force()
            self.first.set()

        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, interrupt)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class Launcher:
    """One deployment's processes, from start to end."""

    def __init__(self, deployment: Deployment, output: Output, start_timeout: float) -> None:
        self.deployment = deployment
        self._output = output
        self._start_timeout = start_timeout
        self._names = {target.listen: target.worker_id for target in deployment.targets}
        self._names |= {draft.listen: draft.worker_id for draft in deployment.drafts}
        self._ready: set[str] = set()
        self._started = self._told_at = time.monotonic()

    async def run(self, session: Session | None = None) -> ExitCode:
        """Until `session` is over, or without one until it is interrupted. Raises StartError if the start fails."""
        supervisor = Supervisor(self.deployment.folder, self._output.line, self._output.say)
        pool = self._make_pool(supervisor)
        interrupts = Interrupts(asyncio.Event())

        def kill() -> None:
            pool.kill()
            supervisor.kill()

        try:
            with interrupts.handled(kill):
                try:
                    await _first(self._serve(supervisor, pool, session), interrupts.first)
                finally:
                    await self._stop(supervisor, pool, interrupts.first.is_set())
                    await pool.close()
        finally:
            supervisor.close()
        if interrupts.forced or (interrupts.first.is_set() and session is not None):
            return ExitCode.INTERRUPTED
        return ExitCode.OK

    def _make_pool(self, supervisor: Supervisor) -> Pool:
        """Raises StartError if the extra that it needs is not installed."""
        if self.deployment.ray is None:
            return LocalPool(supervisor, self.deployment.folder)
        from services.pools.ray_pool import RayPool  # imported late: `ray` is an extra

        return RayPool(self.deployment.ray, self.deployment.folder, self._output.line, self._output.say)

    async def _serve(self, supervisor: Supervisor, pool: Pool, session: Session | None) -> None:
        self._say_start()
        deployment = self.deployment
        supervisor.start([child_spec(deployment.folder, SCHEDULER, deployment.scheduler)])
        await pool.start(deployment.workers)
        await self._wait_ready({supervisor.failure, pool.failure})
        supervisor.settle()
        pool.settle()
        async with self._probe() as probe:
            with _tended(Fleet(deployment, pool, probe, self._output.say, self._start_timeout)):
                self._output.say(LAUNCHER, f"page at {deployment.base_url.removesuffix('/v1')}/ui")
                self._output.say(LAUNCHER, f"OpenAI API at {deployment.base_url}")
                self._output.say(LAUNCHER, f"ready at {deployment.address} after {self._elapsed()}")
                if session is not None:
                    await session(deployment.address)
                else:
                    await asyncio.Event().wait()

    def _probe(self) -> StatusProbe:
        settings = self.deployment.scheduler
        tls_ca = (settings.tls_ca or settings.tls_cert) if settings.tls_cert else None
        return StatusProbe(self.deployment.address, settings.api_keys, tls_ca)

    async def _wait_ready(self, failures: Set[asyncio.Future[None]]) -> None:
        async with self._probe() as probe:
            try:
                async with asyncio.timeout(self._start_timeout):
                    while not self._all_ready(await probe.ask()):
                        failed, _ = await asyncio.wait(
                            failures, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                        )
                        for failure in failed:
                            failure.result()
                        self._say_missing()
            except ChildFailed as error:
                raise StartError(error.complaint or str(error), _exit_code(error)) from None
            except TimeoutError:
                raise StartError(
                    f"not ready after {self._start_timeout:g} s: {self._missing}; see the log, or raise --start-timeout"
                ) from None

    def _say_missing(self) -> None:
        if time.monotonic() >= self._told_at + TOLD_SECONDS:
            self._told_at = time.monotonic()
            why = "; a model's first load on a machine compiles, for up to a minute"
            self._output.say(LAUNCHER, f"after {self._elapsed()} not ready yet: {self._missing}{why}")

    @property
    def _missing(self) -> str:
        return ", ".join(sorted({SCHEDULER, *self._names.values()} - self._ready))

    def _all_ready(self, status: control.GetStatusResponse | None) -> bool:
        """Says what has become ready. Raises StartError if a worker of ours was refused."""
        if status is None:
            return False
        self._mark_ready(SCHEDULER)
        for worker in status.workers:
            name = self._names.get(worker.address, worker.identity.worker_id)
            if name not in self._names.values():
                continue
            if worker.state == control.WORKER_STATE_REFUSED:
                raise StartError(f"{name} was refused: {worker.detail}")
            if worker.state == control.WORKER_STATE_READY:
                self._mark_ready(name)
        return status.ready and self._ready >= set(self._names.values())

    def _mark_ready(self, name: str) -> None:
        if name not in self._ready:
            self._ready.add(name)
            self._output.say(name, f"ready after {self._elapsed()}")

    def _say_start(self) -> None:
        for target in self.deployment.targets:
            self._output.say(target.worker_id, f"loading {target.model}")
        for draft in self.deployment.drafts:
            self._output.say(draft.worker_id, f"loading {draft.model or draft.drafter}")

    async def _stop(self, supervisor: Supervisor, pool: Pool, drain: bool) -> None:
        seconds = self.deployment.scheduler.drain_timeout + EXTRA_SECONDS if drain else WORKER_SECONDS
        if drain:
            self._output.say(LAUNCHER, "draining; Ctrl-C again ends at once")
        await supervisor.end([SCHEDULER], seconds)
        await pool.stop(WORKER_SECONDS)
        await supervisor.stop(())

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:.1f} s"


@contextmanager
def _tended(fleet: Fleet) -> Iterator[None]:
    """Within it the fleet follows demand, and SIGUSR1 replaces every worker."""
    loop = asyncio.get_running_loop()
    tasks = {asyncio.ensure_future(fleet.scale())}
    loop.add_signal_handler(signal.SIGUSR1, lambda: tasks.add(asyncio.ensure_future(fleet.replace_all())))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        for task in tasks:
            task.cancel()


async def _first(work: Awaitable[None], event: asyncio.Event) -> None:
    """Runs `work` until it is done or the event is set."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for one in (task, waiter):
            one.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


def _exit_code(error: ChildFailed) -> ExitCode:
    """A worker that was given a wrong setting was given it by the user."""
    return ExitCode.WRONG_USE if error.code == ExitCode.WRONG_USE else ExitCode.FAILED
