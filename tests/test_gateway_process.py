"""The scheduler process whole: real sockets, a real Redis, a real target worker process with a table model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket as sockets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from outrider import AsyncClient
from outrider.errors import AuthenticationFailed, InvalidRequest, Unavailable
from outrider.events import Started, Tokens
from outrider.v1 import control_service_pb2, control_service_pb2_grpc
from services.discovery import Lease
from services.redis_client import connect
from services.scheduler_process import is_loopback
from services.sequence_records import read_sequences
from services.settings import SchedulerSettings
from services.start_error import ExitCode
from specdec.messages import Load
from tools.identities import target_identity
from tools.served_process import process_settings, refusal, served_process, shared_target, table_target
from tools.waiting import until

PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with shared_target() as worker:
        yield worker.address


@asynccontextmanager
async def serving(config: SchedulerSettings) -> AsyncIterator[AsyncClient]:
    """A client of the process, once a target that it names is ready."""
    async with served_process(config) as process, AsyncClient(process.address) as client:
        if config.targets:
            await until(lambda: ready(client), "the target is ready")
        yield client


async def ready(client: AsyncClient) -> bool:
    return (await client.status()).ready


async def unready(client: AsyncClient) -> bool:
    return not await ready(client)


async def test_a_static_target_serves_text_and_tokens_and_is_recorded(target: str, short_folder: Path) -> None:
    async with serving(process_settings(short_folder, targets=[target])) as client:
        by_ids = await client.complete(token_ids=PROMPT, max_tokens=8, seed=1)
        by_text = await client.complete("w1 w2 w3 w4", max_tokens=8, seed=1)
        assert len(by_ids.token_ids) == 8
        assert by_text.token_ids == by_ids.token_ids
        status = await client.status()
        assert (status.metadata_state, status.active_sequences) == ("connected", 0)
        (model,) = await client.models()
        assert model.name == "table"
        async with connect(f"unix://{short_folder}/redis.sock") as redis:
            await until(lambda: recorded(redis, [12, 12]), "both sequences are recorded")


async def recorded(redis: Redis, lengths: list[int]) -> bool:
    return sorted(record.committed_length for record in await read_sequences(redis, 10)) == lengths


async def test_a_running_sequence_is_shown_and_a_cancelled_one_is_not(target: str, short_folder: Path) -> None:
    async with serving(process_settings(short_folder, targets=[target])) as client:
        events = client.generate(token_ids=PROMPT, max_tokens=400)
        await anext(events)
        await anext(events)
        (shown,) = await sequences_of(client.address)
        assert (shown.prompt_length, shown.target_worker) == (4, "target-0")
        assert shown.epoch.number >= 1
        await events.aclose()
        await until(lambda: nothing_runs(client), "the sequence is gone")


async def sequences_of(address: str) -> list[control_service_pb2.SequenceStatus]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = control_service_pb2_grpc.ControlServiceStub(channel)
        return list((await stub.GetStatus(control_service_pb2.GetStatusRequest(max_sequences=10))).sequences)


async def nothing_runs(client: AsyncClient) -> bool:
    return (await client.status()).active_sequences == 0


async def test_a_target_is_found_by_its_lease_and_shown_with_it(target: str, short_folder: Path) -> None:
    async with serving(process_settings(short_folder)) as client:
        assert not await ready(client)
        lease = Lease(f"unix://{short_folder}/redis.sock", target_identity("target-0"), target, Load)
        await lease.start()
        await until(lambda: ready(client), "the target is ready")
        (shown,) = (await client.status()).workers
        assert shown.lease_remaining is not None
        assert 0 < shown.lease_remaining <= 6
        assert len((await client.complete(token_ids=PROMPT, max_tokens=3)).token_ids) == 3
        await lease.close()


async def test_readiness_is_having_a_live_target(short_folder: Path) -> None:
    async def serves(service: str, wanted: bool = True) -> bool:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return (answer.status == health_pb2.HealthCheckResponse.SERVING) is wanted

    async with (
        table_target(short_folder) as worker,
        serving(process_settings(short_folder, targets=[worker.address])) as client,
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        assert await serves("liveness")
        await until(lambda: serves("readiness"), "it is ready")
        await worker.kill()
        await until(lambda: serves("readiness", False), "it is not ready")
        assert await serves("startup")


async def test_a_running_answer_ends_in_its_own_time_when_it_is_told_to_stop(target: str, short_folder: Path) -> None:
    async with AsyncClient() as client:
        async with served_process(process_settings(short_folder, targets=[target])) as process:
            client.address = process.address
            await until(lambda: ready(client), "the target is ready")
            events = client.generate(token_ids=PROMPT, max_tokens=40)
            assert isinstance(await anext(events), Started)
            rest = asyncio.create_task(collect(events))
        told = await rest
        assert sum(len(event.token_ids) for event in told if isinstance(event, Tokens)) == 40


async def collect(events: AsyncIterator[object]) -> list[object]:
    return [event async for event in events]


async def test_a_request_while_it_drains_is_refused_in_words(target: str, short_folder: Path) -> None:
    config = process_settings(short_folder, targets=[target])
    async with served_process(config) as process, AsyncClient(process.address) as client:
        await until(lambda: ready(client), "the target is ready")
        async with aclosing(client.generate(token_ids=PROMPT, max_tokens=400)) as events:  # 8 s
            await anext(events)
            process.stop.set()
            await until(lambda: unready(client), "it drains")
            with pytest.raises(Unavailable, match="draining"):
                await client.complete(token_ids=PROMPT, max_tokens=1)
            assert isinstance(await anext(events), Tokens)


async def test_a_wrong_request_is_one_line_with_the_cure(target: str, short_folder: Path) -> None:
    async with serving(process_settings(short_folder, targets=[target])) as client:
        with pytest.raises(InvalidRequest, match="the prompt has 600 tokens, the context of table is 512"):
            await client.complete(token_ids=[1] * 600)
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await client.complete("")


async def test_keys_guard_the_whole_process(short_folder: Path) -> None:
    async with served_process(process_settings(short_folder, api_keys=["key"])) as process:
        async with AsyncClient(process.address) as client:
            with pytest.raises(AuthenticationFailed):
                await client.status()
        async with AsyncClient(process.address, api_key="key") as client:
            assert not await ready(client)


async def test_without_any_target_a_request_ends_in_words(short_folder: Path) -> None:
    async with serving(process_settings(short_folder)) as client:
        with pytest.raises(Unavailable, match="no live target"):
            await client.complete("hi")


class TestRefusedStarts:
    """Each is one line that names the cure, and leaves nothing behind."""

    async def test_a_port_in_use(self, short_folder: Path) -> None:
        with sockets.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            error = await refusal(process_settings(short_folder, grpc_port=port))
        assert f"port {port}" in str(error)
        assert "--grpc-port" in str(error)
        assert os.listdir(short_folder) == []

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
    async def test_an_open_address_without_protection(self, short_folder: Path, host: str) -> None:
        error = await refusal(process_settings(short_folder, grpc_host=host))
        assert host in str(error)
        assert "--allow-unauthenticated" in str(error)
        assert error.exit_code is ExitCode.WRONG_USE

    async def test_half_of_a_certificate(self, short_folder: Path) -> None:
        assert "belong together" in str(
            await refusal(process_settings(short_folder, tls_cert=short_folder / "cert.pem"))
        )


@pytest.mark.parametrize("changes", [{"api_keys": ["key"]}, {"allow_unauthenticated": True}])
async def test_an_open_address_with_protection_or_permission_serves(
    short_folder: Path, changes: dict[str, object]
) -> None:
    async with served_process(process_settings(short_folder, grpc_host="0.0.0.0", **changes)) as process:
        port = process.address.rpartition(":")[2]
        async with AsyncClient(f"127.0.0.1:{port}", api_key="key") as client:
            assert not await ready(client)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


PROGRAM = """
import sys
from services.settings import SchedulerSettings
from services.scheduler_process import run_scheduler
code = run_scheduler(SchedulerSettings(grpc_port=0, http_port=0, log_level="info"))
print("torch" in sys.modules, "transformers" in sys.modules, flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_program_drains_on_a_signal_and_never_loads_torch(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        while "serving at" not in (line := process.stderr.readline()):
            assert line, "it ended before it served"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.split() == ["False", "False"]
    assert "Traceback" not in err
