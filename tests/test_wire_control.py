"""`ControlService` over a socket: what a worker tells of itself, and a scheduler of all of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest

from outrider.v1 import control_service_pb2 as pb
from outrider.v1 import control_service_pb2_grpc
from scheduler.scheduler import WorkerView
from services import codec_control, control_servicer
from services.channel import open_channel
from services.codec_control import SequenceView
from services.control_servicer import SchedulerControlServicer
from services.server import Server, ServerConfig
from specdec.messages import Epoch, Load, Role
from tools.fake_worker import IDENTITY
from tools.served import linked, open_item, served

if TYPE_CHECKING:
    from outrider.v1.control_service_pb2_grpc import ControlServiceAsyncStub as Stub

READY = WorkerView("127.0.0.1:1", Role.TARGET, "ready", "", IDENTITY, Load(sequences=2, steps=7))
UNREACHED = WorkerView("127.0.0.1:2", Role.DRAFT, "connecting", "nothing answers", None, None)
SEQUENCES = [SequenceView(f"s{i}", Epoch(1, "scheduler-1"), 3, 5 + i, "t1", "d1", "mixed") for i in range(5)]


@dataclass(slots=True)
class StatusScheduler:
    """As much of a scheduler as a status is made of."""

    ready: bool = True
    views: list[WorkerView] = field(default_factory=lambda: [READY, UNREACHED])

    async def workers(self) -> Sequence[WorkerView]:
        return self.views

    def active_sequences(self) -> int:
        return 5


async def leases() -> dict[str, float]:
    return {"127.0.0.1:1": 4.5}


@contextlib.asynccontextmanager
async def control(servicer: SchedulerControlServicer) -> AsyncIterator[Stub]:
    server = Server(ServerConfig(("127.0.0.1:0",)))
    control_service_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server.grpc)
    (address,) = await server.start((control_servicer.SERVICE_NAME,))
    try:
        async with open_channel(address) as channel:
            yield control_service_pb2_grpc.ControlServiceStub(channel)
    finally:
        await server.drain(0)


async def test_a_scheduler_tells_of_all_its_workers_and_as_many_sequences_as_asked() -> None:
    servicer = SchedulerControlServicer(
        StatusScheduler(), "0.1", lambda limit: SEQUENCES[:limit], lambda: "connected", leases
    )
    async with control(servicer) as stub:
        status = await stub.GetStatus(pb.GetStatusRequest(max_sequences=3))
        assert [codec_control.decode_worker(worker) for worker in status.workers] == [READY, UNREACHED]
        assert [worker.HasField("lease_remaining") for worker in status.workers] == [True, False]
        assert status.workers[0].lease_remaining.ToMilliseconds() == 4500
        assert [codec_control.decode_sequence(view) for view in status.sequences] == SEQUENCES[:3]
        assert (status.ready, status.version, status.metadata_state) == (True, "0.1", "connected")
        assert status.active_sequences == 5
        assert list((await stub.GetStatus(pb.GetStatusRequest())).sequences) == []


async def test_a_scheduler_without_a_target_says_that_it_is_not_ready() -> None:
    async with control(SchedulerControlServicer(StatusScheduler(ready=False, views=[]), "0.1")) as stub:
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert (status.ready, status.metadata_state) == (False, "off")


async def test_a_scheduler_is_no_worker() -> None:
    async with control(SchedulerControlServicer(StatusScheduler(), "0.1")) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetIdentity(pb.GetIdentityRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_worker_tells_of_itself() -> None:
    async with served() as site, linked(site.address) as (link, ear), open_channel(site.address) as channel:
        link.send([open_item("s")])
        await ear.until(1)
        stub = control_service_pb2_grpc.ControlServiceStub(channel)
        status = await stub.GetStatus(pb.GetStatusRequest())
        view = codec_control.decode_worker(status.workers[0])
        assert (view.state, view.identity, status.ready, status.active_sequences) == ("ready", IDENTITY, True, 1)


def test_the_schedulers_side_of_the_wire_loads_no_torch() -> None:
    modules = "services.links, services.control_servicer, services.errors, services.server"
    code = f"import sys, {modules}; print(sorted(m for m in sys.modules if m in ('torch', 'numpy', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
