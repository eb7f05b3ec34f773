"""HTTP in the scheduler process: its port, its keys, its end."""

from __future__ import annotations

import json
import os
import socket as sockets
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from services.start_error import ExitCode
from tools.served_process import process_settings, refusal, served_process, table_target
from tools.waiting import until


def client_of(url: str, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30, **options)


async def status(client: httpx2.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


async def readiness_is(client: httpx2.AsyncClient, code: int) -> bool:
    return await status(client, "/ready") == code


async def test_it_answers_drains_and_ends(short_folder: Path) -> None:
    """While it drains, streams end whole and new requests are refused."""
    async with (
        table_target(short_folder, "--delay", "0.02") as worker,
        served_process(process_settings(short_folder, targets=[worker.address])) as process,
        client_of(process.url) as client,
    ):
        await until(lambda: readiness_is(client, 200), "it is ready")
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "seed": 1}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["model"] == "table"
        assert b"outrider" in (await client.get("/metrics")).content

        body = {"prompt": [1, 2, 3], "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            worker.freeze()  # so that the stream does not end before it drains
            process.stop.set()
            await until(lambda: readiness_is(client, 503), "it drains")
            refused = await client.post("/v1/completions", json={"prompt": [1]})
            assert (refused.status_code, "draining" in refused.text) == (503, True)
            worker.thaw()
            events = [line async for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 60
        await process.task
        with pytest.raises(httpx2.ConnectError):
            await client.get("/health")


async def test_a_lost_target_takes_its_readiness_and_not_its_health(short_folder: Path) -> None:
    async with (
        table_target(short_folder) as worker,
        served_process(process_settings(short_folder, targets=[worker.address])) as process,
        client_of(process.url) as client,
    ):
        assert await status(client, "/health") == 200
        await until(lambda: readiness_is(client, 200), "it is ready")
        await worker.kill()
        await until(lambda: readiness_is(client, 503), "it is not ready")
        assert await status(client, "/health") == 200


async def test_without_a_target_a_request_is_a_503_in_words(short_folder: Path) -> None:
    async with served_process(process_settings(short_folder)) as process, client_of(process.url) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert "no live target" in response.json()["error"]["message"]


class TestRefusedStarts:
    async def test_a_taken_port_is_named_with_its_flag(self, short_folder: Path) -> None:
        with sockets.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            error = await refusal(process_settings(short_folder, http_port=port))
        assert f"port {port}" in str(error)
        assert "--http-port" in str(error)
        assert os.listdir(short_folder) == []

    async def test_an_address_that_is_not_ours(self, short_folder: Path) -> None:
        assert "http_host" in str(
            await refusal(process_settings(short_folder, http_host="nowhere.invalid", api_keys=["k"]))
        )

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
    async def test_an_open_address_without_keys(self, short_folder: Path, host: str) -> None:
        error = await refusal(process_settings(short_folder, http_host=host))
        assert host in str(error)
        assert "api_keys" in str(error)
        assert error.exit_code is ExitCode.WRONG_USE

    async def test_tls_alone_lets_everyone_in(self, short_folder: Path) -> None:
        files = {"tls_cert": short_folder / "cert.pem", "tls_key": short_folder / "key.pem"}
        assert "api_keys" in str(await refusal(process_settings(short_folder, http_host="0.0.0.0", **files)))


async def test_an_open_address_with_keys_serves_those_who_have_one(short_folder: Path) -> None:
    async with (
        served_process(process_settings(short_folder, http_host="0.0.0.0", api_keys=["key"])) as process,
        client_of(process.url.replace("0.0.0.0", "127.0.0.1")) as client,
    ):
        assert await status(client, "/v1/models") == 401
        client.headers["authorization"] = "Bearer key"
        assert await status(client, "/v1/models") == 200


async def test_with_a_certificate_it_speaks_tls(short_folder: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(short_folder / "cert.pem")
    issued.private_key_pem.write_to_path(short_folder / "key.pem")
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    config = process_settings(short_folder, tls_cert=short_folder / "cert.pem", tls_key=short_folder / "key.pem")
    async with served_process(config) as process:
        assert process.url.startswith("https://")
        async with client_of(process.url, verify=trusted) as client:
            assert await status(client, "/health") == 200
