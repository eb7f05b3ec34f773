"""HTTP in the scheduler process and through `outrider up`: its port, its keys, its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket as sockets
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme
from openai import OpenAI

from services.scheduler_process import serve_scheduler
from services.settings import SchedulerSettings
from services.start_error import ExitCode, StartError
from specdec.messages import Role
from tools.process import SECRET
from tools.socket_deployment import WorkerProcess
from tools.up import Up
from tools.waiting import until


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="outrider-test-", dir="/tmp") as name:
        yield Path(name)


def settings(folder: Path, **changes: object) -> SchedulerSettings:
    values = {"grpc_port": 0, "http_port": 0, "secret": SECRET.decode(), "redis_socket": folder / "redis.sock"}
    return SchedulerSettings(**{**values, **changes})  # type: ignore[arg-type]


class Serving:
    """A scheduler process inside the test. `stop` begins its end."""

    def __init__(self, url: str, stop: asyncio.Event, task: asyncio.Task[None]) -> None:
        self.url = url
        self.stop = stop
        self.task = task


@asynccontextmanager
async def serving(config: SchedulerSettings) -> AsyncIterator[Serving]:
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def told(url: str) -> None:
        listening.set_result(url)

    task = asyncio.create_task(serve_scheduler(config, on_http_ready=told, stop=stop))
    await asyncio.wait([task, listening], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield Serving(listening.result(), stop, task)
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await task


@asynccontextmanager
async def target(folder: Path, *arguments: str) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(Role.TARGET, "table_target", f"unix:{folder}/t0", ["--worker-id", "target-0", *arguments])
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()


def client_of(url: str, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30, **options)


async def status(client: httpx2.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


async def test_it_is_ready_with_a_target_and_answers(folder: Path) -> None:
    async with (
        target(folder) as worker,
        serving(settings(folder, targets=[worker.address])) as process,
        client_of(process.url) as client,
    ):
        assert await status(client, "/health") == 200

        async def ready() -> bool:
            return await status(client, "/ready") == 200

        await until(ready, "it is ready")
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "seed": 1}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["model"] == "table"
        assert b"outrider" in (await client.get("/metrics")).content
        await worker.kill()

        async def unready() -> bool:
            return await status(client, "/ready") == 503

        await until(unready, "it is not ready")
        assert await status(client, "/health") == 200


async def test_without_a_target_a_request_is_a_503_in_words(folder: Path) -> None:
    async with serving(settings(folder)) as process, client_of(process.url) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert "no live target" in response.json()["error"]["message"]


async def test_while_it_drains_streams_end_whole_and_new_requests_are_refused(folder: Path) -> None:
    async with (
        target(folder, "--delay", "0.02") as worker,
        serving(settings(folder, targets=[worker.address])) as process,
        client_of(process.url) as client,
    ):

        async def ready() -> bool:
            return await status(client, "/ready") == 200

        await until(ready, "it is ready")
        body = {"prompt": [1, 2, 3], "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.stop.set()

            async def draining() -> bool:
                return await status(client, "/ready") == 503

            await until(draining, "it drains")
            refused = await client.post("/v1/completions", json={"prompt": [1]})
            assert (refused.status_code, "draining" in refused.text) == (503, True)
            events = [line async for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 60
        await process.task
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")


class TestRefusedStarts:
    async def refusal(self, config: SchedulerSettings) -> StartError:
        with pytest.raises(StartError) as caught:
            await serve_scheduler(config)
        assert "\n" not in str(caught.value)
        return caught.value

    async def test_a_taken_port_is_named_with_its_flag(self, folder: Path) -> None:
        with sockets.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            error = await self.refusal(settings(folder, http_port=port))
        assert f"port {port}" in str(error)
        assert "--http-port" in str(error)
        assert os.listdir(folder) == []

    async def test_an_address_that_is_not_ours(self, folder: Path) -> None:
        assert "http_host" in str(await self.refusal(settings(folder, http_host="nowhere.invalid", api_keys=["k"])))

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
    async def test_an_open_address_without_keys(self, folder: Path, host: str) -> None:
        error = await self.refusal(settings(folder, http_host=host))
        assert host in str(error)
        assert "api_keys" in str(error)
        assert error.exit_code is ExitCode.WRONG_USE

    async def test_tls_alone_lets_everyone_in(self, folder: Path) -> None:
        files = {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
        assert "api_keys" in str(await self.refusal(settings(folder, http_host="0.0.0.0", **files)))


async def test_an_open_address_with_keys_serves_those_who_have_one(folder: Path) -> None:
    async with (
        serving(settings(folder, http_host="0.0.0.0", api_keys=["key"])) as process,
        client_of(process.url.replace("0.0.0.0", "127.0.0.1")) as client,
    ):
        assert await status(client, "/v1/models") == 401
        client.headers["authorization"] = "Bearer key"
        assert await status(client, "/v1/models") == 200


async def test_with_a_certificate_it_speaks_tls(folder: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    config = settings(folder, tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")
    async with serving(config) as process:
        assert process.url.startswith("https://")
        async with client_of(process.url, verify=trusted) as client:
            assert await status(client, "/health") == 200


def test_outrider_up_prints_the_base_url_and_the_official_client_takes_it() -> None:
    with Up() as up:
        up.wait_ready()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", up.base_url)
        with (
            httpx2.Client(trust_env=False) as connections,
            OpenAI(base_url=up.base_url, api_key="any", http_client=connections, max_retries=0) as client,
        ):
            answer = client.completions.create(model="", prompt="w1 w2 w3", max_tokens=8)
            assert len(answer.choices[0].text.split()) == 8
        up.process.send_signal(signal.SIGINT)
        up.process.wait(timeout=20)
