"""Workers that come and go by their leases: let go when nothing is left, and taken back when the lease is."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler.request import GenerationRequest
from services.channel import open_channel
from services.worker_process import ServeOptions, serve_target
from specdec.messages import Role
from specdec.params import SamplingParams
from tools.deployment import Deployment
from tools.fake_worker import BUNDLE, FakeTargetWorker
from tools.served import linked, open_item
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=60)


async def is_gone(deployment: Deployment, address: str) -> bool:
    return await deployment.state_of(address) == "unknown"


@pytest.mark.parametrize(("role", "address"), [(Role.TARGET, "target-1"), (Role.DRAFT, "draft-0")])
async def test_a_removed_worker_without_sequences_is_let_go(role: Role, address: str) -> None:
    """Its stream is whole, so that nothing else would end it."""
    async with Deployment([TableModel(LAW), TableModel(LAW)], [TableDrafter(LAW, 0.8)]) as deployment:
        deployment.scheduler.remove_worker(address)
        await until(lambda: is_gone(deployment, address), "it is gone")
        deployment.scheduler.add_worker(role, address)
        await until(deployment.settled, "it is back")
        assert (await deployment.generate(REQUEST)).finish_reason is not None


async def test_a_removed_target_keeps_its_sequence_to_the_end() -> None:
    model = TableModel(LAW)
    async with Deployment([model]) as deployment:
        model.gate.clear()
        running = asyncio.create_task(deployment.generate(REQUEST))
        await until(model.entered.is_set, "it computes")
        deployment.scheduler.remove_worker("target-0")
        state = await deployment.state_of("target-0")
        model.gate.set()
        answer = await running
        assert state == "draining"
        assert len(answer.token_ids) == 60
        assert answer.finished is not None
        assert answer.finished.speculation.num_failovers == 0
        await until(lambda: is_gone(deployment, "target-0"), "it is gone")


async def test_a_worker_whose_lease_comes_back_is_used_again() -> None:
    """As when it could not reach Redis for a while: it was well all the time."""
    model = TableModel(LAW)
    async with Deployment([model]) as deployment:
        model.gate.clear()
        running = asyncio.create_task(deployment.generate(REQUEST))
        await until(model.entered.is_set, "it computes")
        deployment.scheduler.remove_worker("target-0")
        deployment.scheduler.add_worker(Role.TARGET, "target-0")
        model.gate.set()
        assert await deployment.state_of("target-0") == "ready"
        await running
        assert len((await deployment.generate(REQUEST)).token_ids) == 60
        assert await deployment.state_of("target-0") == "ready"


async def test_a_worker_that_hangs_is_not_alive() -> None:
    """So that whoever started it starts it again: a forward that does not end cannot be ended otherwise."""
    worker, stop, ready = FakeTargetWorker(), asyncio.Event(), asyncio.Queue[str]()
    options = ServeOptions(stall_after=0.05, hang_after=0.2, check_every=0.02)
    serving = asyncio.create_task(
        serve_target(worker, BUNDLE, "127.0.0.1:0", on_ready=ready.put, options=options, stop=stop)
    )
    address = await ready.get()

    async def liveness() -> int:
        async with open_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service="liveness")
            return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)).status)

    async def is_alive() -> bool:
        return bool(await liveness() == SERVING)

    async def is_dead() -> bool:
        return bool(await liveness() == NOT_SERVING)

    try:
        async with linked(address) as (link, ear):
            assert await is_alive()
            worker.gate.clear()
            link.send([open_item("s")])
            await until(is_dead, "not alive")
            worker.gate.set()
            await ear.until(1)
            await until(is_alive, "alive again")
    finally:
        stop.set()
        await serving
