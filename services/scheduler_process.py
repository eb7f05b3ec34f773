"""`outrider scheduler`: gateway, scheduler, discovery, records and the embedded Redis in one process. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from outrider.v1 import control_service_pb2_grpc as control_grpc
from outrider.v1 import generation_service_pb2_grpc as generation_grpc
from outrider.version import __version__
from scheduler.audit import ignore
from scheduler.entries import Reader
from scheduler.links import AnyLink, LinkFactory, SequenceRecord
from scheduler.scheduler import Scheduler
from services import control_servicer, event_loop, garbage, generation_servicer, grammar_check, logs, metrics
from services.audit_files import AuditFolder
from services.channel import ChannelConfig, ClientTls
from services.codec_control import SequenceView
from services.control_servicer import SchedulerControlServicer
from services.discovery import WorkerWatcher
from services.embedded_redis import embedded_redis
from services.gateway import Gateway
from services.generation_servicer import GenerationServicer
from services.interceptors import ApiKeyInterceptor
from services.links import LinkConfig, link_factory
from services.metadata import Metadata, RedisRecorder
from services.redis_client import require, with_tls
from services.rounds import RoundStore
from services.server import PortInUse, Server, ServerConfig, TlsFiles
from services.settings import SchedulerSettings
from services.start_error import ExitCode, StartError
from services.telemetry.metrics_process import exported, watch_scheduler
from services.telemetry.tracing_start import SchedulerTracing, trace_scheduler
from specdec.messages import Epoch, Role
from specdec.params import AcceptRule

READINESS_SECONDS = 0.05
LAST_CALLS_SECONDS = 1.0
"""What calls get to end once the sequences have."""

OnReady = Callable[[str], Awaitable[None]]

log = logging.getLogger(__name__)


def run_scheduler(settings: SchedulerSettings) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code. Raises StartError."""
    try:
        logs.configure("scheduler", logs.LogConfig.of(settings, settings.scheduler_id))
    except OSError as error:
        raise StartError(f"cannot write to log_dir {settings.log_dir}: {error.strerror}") from error
    event_loop.run(serve_scheduler(settings))
    return ExitCode.OK


async def serve_scheduler(
    settings: SchedulerSettings,
    *,
    on_ready: OnReady | None = None,
    on_http_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until SIGTERM (or `stop`), then drains. on_http_ready is told the URL and on_ready the real address of
    gRPC, once both listen.

    Raises StartError if it cannot serve as configured.
    """
    refuse_exposed(settings)
    stop = stop or asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(_signals(stop))
        tracing = trace_scheduler(settings)
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        server = _server(settings, tracing)
        core = _core(settings, await _redis_url(settings, stack), tracing)
        scheduler = core.scheduler
        counted = metrics.process_metrics()
        watch_scheduler(counted, scheduler, lambda: core.recorder.state)
        stack.enter_context(exported(counted, settings, "scheduler", settings.scheduler_id))
        address = await _listen(server, settings, core)
        stack.push_async_callback(server.drain, LAST_CALLS_SECONDS)
        url_of_http = await _listen_http(settings, core, tracing, stack)
        await _start(core, settings, stack)
        await server.set_health("startup", True)  # it has started; whether a target is there is readiness
        log.info("serving at %s and %s", address, url_of_http)
        garbage.start_is_over()
        if on_http_ready is not None:
            await on_http_ready(url_of_http)
        if on_ready is not None:
            await on_ready(address)
        await _follow_readiness(server, scheduler, stop)
        log.info("draining %d sequences", scheduler.active_sequences())
        await server.set_ready(False)
        await scheduler.drain(settings.drain_timeout)


@dataclass(frozen=True, slots=True)
class _Core:
    """What serves, whatever it is asked through."""

    recorder: Metadata
    rounds: RoundStore
    scheduler: Scheduler
    watcher: WorkerWatcher
    gateway: Gateway


def _core(settings: SchedulerSettings, redis_url: str, tracing: SchedulerTracing | None) -> _Core:
    recorder = RedisRecorder(redis_url)
    rounds = RoundStore()
    readers: list[Reader] = [rounds.read, *([tracing.reader] if tracing else [])]
    scheduler = _scheduler(settings, recorder, readers)
    watcher = WorkerWatcher(redis_url, scheduler, static=(*settings.targets, *settings.drafters))
    gateway = Gateway(scheduler, AcceptRule(settings.accept_rule), grammar_check.check, settings.log_prompts)
    return _Core(recorder, rounds, scheduler, watcher, gateway)


async def _start(core: _Core, settings: SchedulerSettings, stack: AsyncExitStack) -> None:
    """Records, schedules and looks for workers until the stack is left."""
    stack.callback(core.rounds.close)
    for part in (core.recorder, core.scheduler, core.watcher):
        await part.start()
        stack.push_async_callback(part.close)
    for role, addresses in ((Role.TARGET, settings.targets), (Role.DRAFT, settings.drafters)):
        for worker in addresses:
            core.scheduler.add_worker(role, worker)


def refuse_exposed(settings: SchedulerSettings) -> None:
    """Raises StartError if an API is open to other machines: gRPC with neither keys nor TLS, HTTP without keys."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise StartError("tls_cert and tls_key belong together: give both", ExitCode.WRONG_USE)
    if settings.api_keys or settings.allow_unauthenticated:
        return
    if not settings.tls_cert and not is_loopback(settings.grpc_host):
        raise StartError(
            f"{settings.grpc_host} can be reached from other machines and nothing protects it: "
            "set api_keys or tls_cert and tls_key, or give --allow-unauthenticated",
            ExitCode.WRONG_USE,
        )
    if not is_loopback(settings.http_host):
        raise StartError(
            f"{settings.http_host} can be reached from other machines and without keys HTTP lets everyone in: "
            "set api_keys, or give --allow-unauthenticated",
            ExitCode.WRONG_USE,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Names but `localhost` are not trusted to stay what they are."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _scheduler(settings: SchedulerSettings, recorder: Metadata, readers: Sequence[Reader]) -> Scheduler:
    return Scheduler(
        settings.scheduler_config(),
        make_links(settings),
        recorder,
        metrics.process_metrics(),
        settings.audit_config(),
        AuditFolder(settings.audit_dir) if settings.audit_dir else ignore,
        readers=readers,
    )


def make_links(settings: SchedulerSettings) -> LinkFactory:
    """TLS to workers on other machines if tls_ca says whom to trust; private sockets need none."""
    counters = metrics.process_metrics()
    plain = link_factory(counters=counters)
    if settings.tls_ca is None:
        return plain
    tls = ClientTls(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_worker_name)
    secured = link_factory(LinkConfig(channel=ChannelConfig(tls=tls)), counters)

    def make_link(role: Role, address: str) -> AnyLink:
        return plain(role, address) if address.startswith("unix:") else secured(role, address)

    return make_link


def _server(settings: SchedulerSettings, tracing: SchedulerTracing | None) -> Server:
    tls = TlsFiles(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
    host = f"[{settings.grpc_host}]" if ":" in settings.grpc_host.strip("[]") else settings.grpc_host
    config = ServerConfig((f"{host}:{settings.grpc_port}",), tls, health_address=settings.health_listen)
    keys = [ApiKeyInterceptor(settings.api_keys)] if settings.api_keys else []
    return Server(config, [*keys, *([tracing.interceptor] if tracing else [])])


async def _redis_url(settings: SchedulerSettings, stack: AsyncExitStack) -> str:
    url = with_tls(settings.redis_url, settings.tls_ca, settings.tls_cert, settings.tls_key)
    if url is None:
        return await stack.enter_async_context(embedded_redis(socket=settings.redis_socket))
    await require(url)
    return url


async def _listen(server: Server, settings: SchedulerSettings, core: _Core) -> str:
    """Returns the real address. Raises StartError."""
    generation_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(core.gateway), server.grpc)
    control = SchedulerControlServicer(
        core.scheduler,
        __version__,
        sequences=lambda limit: [_view(record) for record in core.recorder.running(limit)],
        metadata_state=lambda: core.recorder.state,
        leases=core.watcher.leases,
        rounds=core.rounds,
    )
    control_grpc.add_ControlServiceServicer_to_server(control, server.grpc)
    try:
        (address,) = await server.start((generation_servicer.SERVICE_NAME, control_servicer.SERVICE_NAME))
    except PortInUse as error:
        raise StartError(
            f"port {settings.grpc_port} on {settings.grpc_host} is taken: choose another one with --grpc-port"
        ) from error
    return address


async def _listen_http(
    settings: SchedulerSettings, core: _Core, tracing: SchedulerTracing | None, stack: AsyncExitStack
) -> str:
    """Until the stack is left. Returns the real URL. Raises StartError."""
    from services.http.process import http_server  # imported late: `outrider up` needs `refuse_exposed` alone
    from services.http.ui_events import StatusBoard
    from services.http.ui_routes import UiRoutes

    scheduler = core.scheduler
    ui = UiRoutes(core.gateway, core.rounds, StatusBoard(scheduler, core.rounds, core.watcher.leases))
    calls = tracing.calls if tracing else None
    http = http_server(settings, core.gateway, lambda: scheduler.ready, metrics.render, ui, calls)
    url = await http.start()
    stack.push_async_callback(http.close, LAST_CALLS_SECONDS)
    return url


def _view(record: SequenceRecord) -> SequenceView:
    return SequenceView(
        sequence_id=record.sequence_id,
        epoch=Epoch(record.epoch_number, record.epoch_owner),
        prompt_length=record.prompt_length,
        committed_length=record.committed_length,
        target_worker=record.target_worker,
        draft_worker=record.draft_worker,
        mode="speculative" if record.draft_worker else "plain",
    )


async def _follow_readiness(server: Server, scheduler: Scheduler, stop: asyncio.Event) -> None:
    """Until it is told to stop: ready is having a live target."""
    ready = False
    while not stop.is_set():
        if scheduler.ready != ready:
            ready = scheduler.ready
            log.info("ready" if ready else "not ready: no live target worker")
            await server.set_ready(ready)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READINESS_SECONDS):
                await stop.wait()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C drain, a second Ctrl-C ends at once. A terminal sends Ctrl-C to a launcher's children too;
    those wait for SIGTERM. In a thread other than the main one nothing is changed."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if os.environ.get(logs.LAUNCHED_VARIABLE):
            return
        if stop.is_set():
            os._exit(ExitCode.INTERRUPTED)  # the embedded Redis sees its pipe close
        stop.set()

    caught: list[signal.Signals] = []
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
        for number, handler in ((signal.SIGTERM, stop.set), (signal.SIGINT, interrupt)):
            loop.add_signal_handler(number, handler)
            caught.append(number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
