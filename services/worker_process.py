"""A worker as a process: serves its streams, says how it does, drains when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.v1 import control_service_pb2_grpc as control_grpc
from outrider.v1 import draft_service_pb2_grpc as draft_grpc
from outrider.v1 import target_service_pb2_grpc as target_grpc
from services import control_servicer, draft_servicer, target_servicer
from services.control_servicer import WorkerControlServicer
from services.draft_servicer import DraftServicer
from services.progress import Progress
from services.server import Server, ServerConfig, TlsFiles
from services.target_servicer import TargetServicer
from services.telemetry.tracing_start import WorkerTracing
from services.telemetry.tracing_worker import TracedWorker
from services.worker_stream import ItemIn, ResultOut, StreamServer, StreamWorker
from specdec.messages import DraftItem, DraftResult, TargetItem, TargetResult, TokenizerBundle

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
STREAM_GRACE = 1.0
"""Seconds that a scheduler has to take the last results."""

STOP_TIMEOUT = 10.0
"""Seconds that the running forward has to end."""

OnReady = Callable[[str], Awaitable[None]]
MakeLease = Callable[[str], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Seconds. grace: how long running sequences may take to end after SIGTERM. stall_after: how long the worker may
    owe an answer without a step before it is not ready, hang_after: before it is not alive. check_every: how often that
    is looked at.
    health_address: of a second listener, for health alone and without TLS.

    ignore_sigint: for a child of a launcher, since a terminal sends Ctrl-C to all of them; else SIGINT drains too.
    tracing: closed in the end.
    """

    tls: TlsFiles | None = None
    grace: float = 30.0
    stall_after: float = 30.0
    hang_after: float = 150.0
    check_every: float = 0.5
    health_address: str | None = None
    ignore_sigint: bool = False
    tracing: WorkerTracing | None = None


class WorkerCrashed(Exception):
    """The worker's own loop failed: the process must end, so that another takes its place."""


async def serve_target(
    worker: StreamWorker[TargetItem, TargetResult],
    bundle: TokenizerBundle,
    listen: str,
    *,
    on_ready: OnReady | None = None,
    lease: MakeLease | None = None,
    options: ServeOptions | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until SIGTERM (or `stop`), then drains. Starts the worker and stops it. Raises PortInUse, CannotListen,
    WorkerCrashed.

    listen: `HOST:PORT` or `unix:PATH`. on_ready is told the real address. lease(address) is held while new sequences
    are welcome.
    """
    options = options or ServeOptions()
    process = _WorkerProcess(worker, listen, options, stop or asyncio.Event(), bundle.tokenizer_json)
    servicer = TargetServicer(_traced(worker, options.tracing), bundle, process.progress)
    target_grpc.add_TargetServiceServicer_to_server(servicer, process.server.grpc)
    await process.run(servicer.streams, target_servicer.SERVICE_NAME, on_ready, lease)


async def serve_draft(
    worker: StreamWorker[DraftItem, DraftResult],
    listen: str,
    *,
    tokenizer_json: bytes | None = None,
    on_ready: OnReady | None = None,
    lease: MakeLease | None = None,
    options: ServeOptions | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """As `serve_target`, for a draft worker. tokenizer_json: of its model, if it has one."""
    options = options or ServeOptions()
    process = _WorkerProcess(worker, listen, options, stop or asyncio.Event(), tokenizer_json)
    servicer = DraftServicer(_traced(worker, options.tracing), process.progress)
    draft_grpc.add_DraftServiceServicer_to_server(servicer, process.server.grpc)
    await process.run(servicer.streams, draft_servicer.SERVICE_NAME, on_ready, lease)


def _traced(worker: StreamWorker[ItemIn, ResultOut], tracing: WorkerTracing | None) -> StreamWorker[ItemIn, ResultOut]:
    return worker if tracing is None else TracedWorker(worker, tracing.tracing)


class _WorkerProcess:
    def __init__(
        self,
        worker: StreamWorker[Any, Any],
        listen: str,
        options: ServeOptions,
        stop: asyncio.Event,
        tokenizer_json: bytes | None,
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self.server = Server(
            ServerConfig((listen,), options.tls, health_address=options.health_address),
            [options.tracing.interceptor] if options.tracing else [],
        )
        self.progress = Progress(worker.load, options.stall_after)
        self._worker = worker
        self._options = options
        self._stop = stop
        self._state = "ready"
        self._hangs = False

    async def run(
        self, streams: StreamServer[Any, Any, Any, Any], service: str, on_ready: OnReady | None, lease: MakeLease | None
    ) -> None:
        control = WorkerControlServicer(self._worker, "", lambda: self._state, self._tokenizer_json)
        control_grpc.add_ControlServiceServicer_to_server(control, self.server.grpc)
        (address,) = await self.server.start((service, control_servicer.SERVICE_NAME))
        control.address = address
        self._worker.start()
        try:
            with _signals(self._stop, self._options.ignore_sigint):
                async with lease(address) if lease else contextlib.nullcontext():
                    await self.server.set_ready(True)
                    if on_ready is not None:
                        await on_ready(address)
                    await self._watch()
                # The lease is gone: nobody new is sent here, and whoever comes is refused.
                await self._drain(streams)
        finally:
            # In this order: what the worker decided is delivered, then written, then the streams end.
            await _stop_worker(self._worker)
            streams.finish()
            await self.server.drain(grace=STREAM_GRACE)
            if self._options.tracing is not None:
                await self._options.tracing.close()

    async def _watch(self) -> None:
        """Until it is told to stop. Readiness follows progress. Raises WorkerCrashed."""
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._options.check_every)
            if self._worker.crash is not None:
                raise WorkerCrashed(f"the worker's loop ended: {self._worker.crash!r}")
            await self._follow_liveness()
            state = "suspended" if self.progress.stalled else "ready"
            if state != self._state:
                log.warning("worker is %s", "ready again" if state == "ready" else "not making progress")
                self._state = state
                await self.server.set_ready(state == "ready")

    async def _follow_liveness(self) -> None:
        """A forward that hangs cannot be ended but with its process, which is up to whoever started it."""
        hangs = self.progress.waited > self._options.hang_after
        if hangs != self._hangs:
            log.warning("worker hangs: it must be started again" if hangs else "worker hangs no more")
            self._hangs = hangs
            await self.server.set_health("liveness", not hangs)

    async def _drain(self, streams: StreamServer[Any, Any, Any, Any]) -> None:
        """Running sequences end in their own time; streams stay open for them."""
        self._state = "draining"
        self._worker.drain()
        await self.server.set_ready(False)
        log.info("draining %d sequences on %d streams", self._worker.load().sequences, streams.open_streams)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.grace):
                # The counters live on the worker's thread, which knows no event of ours.
                while self._worker.load().sequences and streams.open_streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


async def _stop_worker(worker: StreamWorker[Any, Any]) -> None:
    """On a daemon thread: a forward that hangs must not keep the process alive."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        worker.stop()
        with contextlib.suppress(RuntimeError):  # the loop did not wait so long
            loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=stop, name="worker-stop", daemon=True).start()
    try:
        await asyncio.wait_for(stopped.wait(), STOP_TIMEOUT)
    except TimeoutError:
        log.error("the worker did not stop within %g s; leaving it behind", STOP_TIMEOUT)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, ignore_sigint: bool) -> Iterator[None]:
    """SIGTERM, and SIGINT unless it is ignored, set `stop`. In a thread other than the main one nothing is changed."""
    loop = asyncio.get_running_loop()
    caught: list[signal.Signals] = []
    try:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        caught.append(signal.SIGTERM)
        # A handler that does nothing, since SIG_IGN would be inherited by children.
        loop.add_signal_handler(signal.SIGINT, (lambda: None) if ignore_sigint else stop.set)
        caught.append(signal.SIGINT)
    except (ValueError, RuntimeError, NotImplementedError):
        log.debug("no signal handlers outside the main thread")
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
