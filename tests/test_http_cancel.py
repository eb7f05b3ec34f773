"""A generation lives as long as its client listens, and ends with it at once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from services.http import answer
from services.http.app import HttpConfig
from tools.scripted_scheduler import ScriptedScheduler
from tools.served_http import served_http, served_openai
from tools.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "say hello"}]
LONG = tuple(b"x" * 900)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_cancels_what_it_asked_for(path: str, stream: bool, n: int) -> None:
    """While nothing is sent: the scheduler is held at its first block."""
    scheduler = ScriptedScheduler(LONG)
    scheduler.gate.clear()
    prompt: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    body = {**prompt, "stream": stream, "n": n, "max_tokens": 900}
    async with served_http(scheduler) as url:
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            await until(lambda: scheduler.running == n, "it runs")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: scheduler.running == 0, "it was cancelled")
    assert len(scheduler.requests) == n


async def test_a_stream_that_is_closed_in_the_middle_is_cancelled() -> None:
    scheduler = ScriptedScheduler(LONG, gated_from=2)
    scheduler.gate.clear()
    async with served_openai(scheduler) as client:
        stream = await client.chat.completions.create(model="bytes", messages=HELLO, stream=True)
        await anext(aiter(stream))
        assert scheduler.running == 1
        await stream.close()
        await until(lambda: scheduler.running == 0, "it was cancelled")


async def test_a_client_that_goes_while_it_sends_its_body_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with served_openai(ScriptedScheduler(), HttpConfig()) as client:
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write((head + "content-length: 100\r\n\r\n{").encode())
        await writer.drain()
        writer.close()
        answered = await client.chat.completions.create(model="bytes", messages=HELLO)
    assert answered.choices[0].message.content == "hello"
    assert "Traceback" not in caplog.text


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "READ_SECONDS", 0.2)
    scheduler = ScriptedScheduler(tuple(b"x" * 1000), block=1, unending=True)
    body = b'{"prompt": "x", "max_tokens": 1000, "n": 60, "stream": true, "temperature": 1}'
    async with served_http(scheduler) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await until(lambda: len(scheduler.requests) == 60, "it runs")
        await until(lambda: scheduler.running == 0, "it was given up")
        writer.transport.abort()
