"""Worker processes: killed, frozen, drained; readiness that means progress; the lease's life."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler.links import LinkError
from services.channel import ChannelConfig, open_channel
from services.links import GrpcTargetLink, LinkConfig
from services.progress import Progress
from services.server import PortInUse
from services.worker_process import ServeOptions, WorkerCrashed, serve_target
from specdec.messages import Load, Opened
from tools.fake_worker import BUNDLE, FakeTargetWorker
from tools.served import Ear, linked, open_item, release_item, verify_item
from tools.waiting import PATIENCE, until

ROOT = Path(__file__).parents[1]
QUICK = LinkConfig(channel=ChannelConfig(keepalive_time=0.5, keepalive_timeout=0.5))


@dataclass(frozen=True, slots=True)
class Child:
    process: asyncio.subprocess.Process
    address: str

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextlib.asynccontextmanager
async def child(listen: str = "127.0.0.1:0") -> AsyncIterator[Child]:
    """The fake worker as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "tests/tools/fake_worker.py"), listen,
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        yield Child(process, address)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def test_lost_when_the_process_is_killed() -> None:
    async with child() as worker, linked(worker.address) as (link, ear):
        link.send([open_item("s")])
        await ear.until(1)
        worker.send(signal.SIGKILL)
        assert await ear.until_lost()
        with pytest.raises(LinkError):
            await link.identify()
        assert len(ear.losses) == 1


async def test_a_frozen_process_is_noticed_by_keepalive_within_its_time() -> None:
    """SIGSTOP: the kernel keeps the connection, only the unanswered ping tells. Configured: 0.5 s + 0.5 s."""
    async with child() as worker, linked(worker.address, QUICK) as (link, ear):
        link.send([open_item("s")])
        await ear.until(1)
        worker.send(signal.SIGSTOP)
        cause = await ear.until_lost(within=10)  # ten times its time, for a busy machine
        assert "ping" in cause or "keepalive" in cause
        await link.close()
        assert len(ear.losses) == 1


async def test_a_resting_link_is_not_sent_away_for_its_pings() -> None:
    """A server that finds pings too frequent closes the connection: without our option after 4.3 s of these."""
    config = LinkConfig(channel=ChannelConfig(keepalive_time=0.3, keepalive_timeout=20.0))
    async with child() as worker, linked(worker.address, config) as (link, ear):
        with pytest.raises(TimeoutError):
            await ear.until_lost(within=6)
        link.send([open_item("s")])
        await ear.until(1)


async def test_sigterm_drains_while_tokens_keep_flowing() -> None:
    async with child() as worker, linked(worker.address) as (link, ear):
        link.send([open_item("s")])
        await ear.until(1)
        worker.send(signal.SIGINT)  # a terminal's Ctrl-C, which the launcher handles
        worker.send(signal.SIGTERM)
        await until(lambda: _readiness_is(worker.address, serving=False), "not ready")
        for i in range(5):
            link.send([verify_item("s", [i])])
            await ear.until(2 + i)
        assert ear.losses == []
        assert worker.process.returncode is None
        link.send([release_item("s")])
        await ear.until(7)
        assert await ear.until_lost() == "the worker ended the stream"
        assert await asyncio.wait_for(worker.process.wait(), PATIENCE) == 0


async def test_sigterm_without_sequences_ends_at_once() -> None:
    async with child() as worker, linked(worker.address):
        worker.send(signal.SIGTERM)
        assert await asyncio.wait_for(worker.process.wait(), 15) == 0  # its grace would be 20 s


async def test_sigint_is_ignored_when_told_so() -> None:
    async with child() as worker, linked(worker.address) as (link, ear):
        worker.send(signal.SIGINT)
        link.send([open_item("s")])
        await ear.until(1)
        assert ear.losses == []


async def test_a_second_process_cannot_take_the_port() -> None:
    async with child() as worker:
        with pytest.raises(PortInUse):
            await serve_target(FakeTargetWorker(), BUNDLE, worker.address)
        async with linked(worker.address) as (link, ear):
            link.send([open_item("s")])
            await ear.until(1)


async def test_a_killed_process_leaves_its_port_to_the_next() -> None:
    async with child() as first:
        async with linked(first.address) as (link, ear):
            link.send([open_item("s")])
            await ear.until(1)
            first.send(signal.SIGKILL)
            await ear.until_lost()
        await first.process.wait()
        async with child(first.address) as second:
            assert second.address == first.address


async def test_readiness_falls_when_owed_work_makes_no_step_and_returns_with_it() -> None:
    worker, stop, ready = FakeTargetWorker(), asyncio.Event(), asyncio.Queue[str]()
    options = ServeOptions(stall_after=0.2, check_every=0.02)
    serving = asyncio.create_task(
        serve_target(worker, BUNDLE, "127.0.0.1:0", on_ready=ready.put, options=options, stop=stop)
    )
    address = await ready.get()
    try:
        async with linked(address) as (link, ear):
            await until(lambda: _readiness_is(address, serving=True), "ready")
            worker.gate.clear()
            link.send([open_item("s")])
            await until(lambda: _readiness_is(address, serving=False), "not ready while it hangs")
            assert (await _status(address, "liveness")) == health_pb2.HealthCheckResponse.SERVING
            worker.gate.set()
            await ear.until(1)
            await until(lambda: _readiness_is(address, serving=True), "ready again")
    finally:
        stop.set()
        await serving


async def test_the_lease_is_held_while_new_sequences_are_welcome() -> None:
    events: list[str] = []
    worker, stop, ready = FakeTargetWorker(), asyncio.Event(), asyncio.Queue[str]()

    @contextlib.asynccontextmanager
    async def lease(address: str) -> AsyncIterator[None]:
        events.append(f"registered {address}, draining {worker.draining}")
        yield
        events.append(f"left, draining {worker.draining}, open {worker.load().sequences}")

    serving = asyncio.create_task(
        serve_target(worker, BUNDLE, "127.0.0.1:0", on_ready=ready.put, lease=lease, stop=stop)
    )
    address = await ready.get()
    async with linked(address) as (link, ear):
        link.send([open_item("s")])
        await ear.until(1)
        stop.set()
        await until(lambda: worker.draining, "draining")
        link.send([release_item("s")])
        await serving
        assert isinstance(ear.results[0].body, Opened)
    assert events == [f"registered {address}, draining False", "left, draining False, open 1"]


async def test_sequences_that_do_not_end_are_cut_after_the_grace() -> None:
    worker, stop, ready = FakeTargetWorker(), asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(
        serve_target(worker, BUNDLE, "127.0.0.1:0", on_ready=ready.put, options=ServeOptions(grace=0.1), stop=stop)
    )
    async with linked(await ready.get()) as (link, ear):
        link.send([open_item("s")])
        await ear.until(1)
        stop.set()
        await asyncio.wait_for(serving, PATIENCE)
        await ear.until_lost()


async def test_a_worker_whose_forward_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker_process.STOP_TIMEOUT", 0.1)
    release = threading.Event()

    class Hung(FakeTargetWorker):
        def stop(self) -> None:
            release.wait()
            super().stop()

    stop, ready = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(serve_target(Hung(), BUNDLE, "127.0.0.1:0", on_ready=ready.put, stop=stop))
    await ready.get()
    stop.set()
    await asyncio.wait_for(serving, PATIENCE)
    release.set()


def test_a_resting_worker_never_stalls() -> None:
    now, load = [0.0], Load(steps=5)
    progress = Progress(lambda: load, 10.0, clock=lambda: now[0])
    now[0] = 1000.0
    assert not progress.stalled
    progress.owe()
    now[0] = 1009.0
    assert not progress.stalled
    now[0] = 1011.0
    stalls = [progress.stalled]
    load.steps += 1  # a long prefill: no answer yet, but it steps
    stalls.append(progress.stalled)
    now[0] = 1022.0
    stalls.append(progress.stalled)
    progress.answered()
    assert [*stalls, progress.stalled] == [True, False, True, False]


async def test_a_unix_socket_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    async with child(f"unix:{path}") as worker, linked(worker.address) as (link, _):
        assert await link.identify()
        worker.send(signal.SIGTERM)
        assert await asyncio.wait_for(worker.process.wait(), PATIENCE) == 0
    assert not path.exists()


async def test_a_link_to_a_frozen_process_gives_up_in_time() -> None:
    async with child() as worker:
        worker.send(signal.SIGSTOP)
        link, ear = GrpcTargetLink(worker.address, LinkConfig(connect_timeout=0.5, call_timeout=0.5)), Ear()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(LinkError, match=r"0\.5 s"):
                await link.open(ear.deliver, ear.lost)
            with pytest.raises(LinkError):
                await link.load()
            await link.close()
        # The kernel still takes connections for it: that alone means nothing.
        host, port = worker.address.split(":")
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


async def _status(address: str, service: str) -> int:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE)).status)


async def _readiness_is(address: str, serving: bool) -> bool:
    wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    try:
        return await _status(address, "readiness") == int(wanted)
    except grpc.RpcError:
        return False


async def test_a_worker_whose_loop_failed_ends_its_process() -> None:
    worker = FakeTargetWorker()
    serving = asyncio.create_task(
        serve_target(worker, BUNDLE, "127.0.0.1:0", options=ServeOptions(check_every=0.01, grace=0.1))
    )
    await asyncio.sleep(0)
    worker.crash = RuntimeError("planted")
    with pytest.raises(WorkerCrashed, match="planted"):
        await asyncio.wait_for(serving, PATIENCE)
