"""`outrider batch` against a gateway: each request answered once, whatever interrupts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scheduler.errors import Overloaded, Unavailable
from scheduler.request import Event, GenerationRequest
from services.batch.batch import Batch, BatchConfig, Tally
from services.batch.server import ServerConfig
from services.gateway import Generator
from services.http.app import HttpConfig
from services.start_error import ExitCode, StartError
from specdec.messages import Identity, TokenizerBundle
from tools.deployment import Deployment
from tools.identities import tokenizer_bundle
from tools.scripted_scheduler import ScriptedScheduler
from tools.served_http import served_http
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.up import ROOT, environment
from tools.waiting import until


@dataclass
class Asked:
    """The real scheduler; keeps every prompt that it is asked. Requests behind the first `stop_at` wait for `gate`."""

    inner: Generator
    stop_at: int = 0
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        self.prompts.append(tuple(request.token_ids))
        if len(self.prompts) > self.stop_at:
            await self.gate.wait()
        async for event in self.inner.generate(request):
            yield event

    def models(self) -> Sequence[Identity]:
        return self.inner.models()

    async def tokenizer(self, model: str) -> TokenizerBundle:
        return await self.inner.tokenizer(model)


@asynccontextmanager
async def table_gateway(stop_at: int) -> AsyncIterator[tuple[str, Asked]]:
    async with Deployment([TableModel(TableLaw(vocabulary_size=64, order=2))]) as system:
        system.targets[0].bundle = tokenizer_bundle(system.targets[0].worker.identity)
        asked = Asked(system.scheduler, stop_at)
        async with served_http(asked) as url:
            yield url, asked
        await system.idle()


class Silent:
    def show(self, tally: Tally) -> None:
        pass


def requests(count: int, **changes: Any) -> list[dict[str, Any]]:
    """All with another prompt."""
    return [
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [i // 64 % 64, i % 64, i // 4096], "max_tokens": 2, "temperature": 0, **changes},
        }
        for i in range(count)
    ]


def write(path: Path, asked: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in asked))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(folder: Path, url: str, concurrency: int = 4, **server: Any) -> Batch:
    config = ServerConfig(url, first_pause=0.001, connections=concurrency, **server)
    files = folder / "in.jsonl", folder / "out.jsonl", folder / "out.errors.jsonl"
    return Batch(BatchConfig(*files, config, concurrency), Silent())


async def command(folder: Path, url: str, *more: str) -> asyncio.subprocess.Process:
    words = ("batch", str(folder / "in.jsonl"), str(folder / "out.jsonl"), "--url", url, *more)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli.main", *words, cwd=ROOT, env=environment(), stderr=asyncio.subprocess.PIPE
    )


async def test_two_thousand_killed_half_way_and_resumed_are_each_answered_once(tmp_path: Path) -> None:
    count, concurrency = 2000, 32
    asked = write(tmp_path / "in.jsonl", requests(count)).read_text().splitlines()
    async with table_gateway(stop_at=count // 2) as (url, gateway):
        first = await command(tmp_path, url, "--concurrency", str(concurrency))
        in_flight = count // 2 + concurrency
        await until(lambda: len(gateway.prompts) == in_flight, "half are answered", patience=60)
        first.kill()
        await first.communicate()
        gateway.gate.set()
        answered_before = (tmp_path / "out.jsonl").read_bytes().count(b"\n")
        assert count // 2 - concurrency <= answered_before <= count // 2
        with (tmp_path / "out.jsonl").open("ab") as file:  # what a kill in the middle of a write would leave
            file.write(b'{"id": "batch_req_12')

        second = await command(tmp_path, url, "--concurrency", str(concurrency))
        _, told = await second.communicate()

        assert second.returncode == 0, told
        assert f"{count} of {count} requests answered" in told.decode()
        repeated = sum(Counter(gateway.prompts).values()) - count
        assert repeated <= concurrency  # only what was in flight when it was killed
    found = answers(tmp_path / "out.jsonl")
    assert Counter(one["custom_id"] for one in found) == Counter(json.loads(line)["custom_id"] for line in asked)
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in found)
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 2 for one in found)


async def test_an_answer_is_that_of_its_request(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    asked = [
        *requests(1, prompt="say hello", max_tokens=3),
        {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        },
    ]
    write(tmp_path / "in.jsonl", asked)
    async with served_http(scheduler) as url:
        tally = await batch(tmp_path, f"{url}/v1/").run()

    found = {one["custom_id"]: one["response"] for one in answers(tmp_path / "out.jsonl")}
    assert found["request-0"]["body"]["choices"][0]["text"] == "hel"
    assert found["chat"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert found["chat"]["request_id"].startswith("req_")
    assert tally == Tally(total=2, answered=2, failed=0, tokens=8)


async def test_what_the_server_refuses_is_an_error_and_is_not_asked_again(tmp_path: Path) -> None:
    asked = requests(3, prompt="say hello", max_tokens=3)
    asked[1]["body"]["temperature"] = -1
    asked[2]["body"]["temprature"] = 1
    write(tmp_path / "in.jsonl", asked)
    scheduler = ScriptedScheduler()
    async with served_http(scheduler) as url:
        tally = await batch(tmp_path, url).run()
        assert len(scheduler.requests) == 1
        assert await batch(tmp_path, url).run() == Tally(total=3, answered=3, failed=2)
        assert len(scheduler.requests) == 1

    assert (tally.answered, tally.failed) == (3, 2)
    errors = {one["custom_id"]: one["response"]["body"]["error"] for one in answers(tmp_path / "out.errors.jsonl")}
    assert errors["request-1"]["param"] == "temperature"
    assert errors["request-2"]["message"] == "temprature: this field is not supported here"
    assert [one["custom_id"] for one in answers(tmp_path / "out.jsonl")] == ["request-0"]


class Recovering(ScriptedScheduler):
    """The first request fails with `fail_at_start`."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        if self.requests:
            self.fail_at_start = None
        async for event in super().generate(request):
            yield event


@pytest.mark.parametrize(
    "error", [Overloaded("full", retry_after=0), Unavailable("no live target"), RuntimeError("a bug")], ids=type
)
async def test_what_may_pass_is_asked_again(tmp_path: Path, error: Exception) -> None:
    scheduler = Recovering(fail_at_start=error)
    write(tmp_path / "in.jsonl", requests(1, prompt="say hello"))
    async with served_http(scheduler) as url:
        tally = await batch(tmp_path, url, concurrency=1).run()

    assert (tally.answered, tally.failed, len(scheduler.requests)) == (1, 0, 2)


async def test_a_server_that_always_fails_on_a_request_gets_it_three_times(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(fail_at_start=RuntimeError("a bug"))
    write(tmp_path / "in.jsonl", requests(1, prompt="say hello"))
    async with served_http(scheduler) as url:
        tally = await batch(tmp_path, url).run()

    assert (tally.failed, len(scheduler.requests)) == (1, 3)
    assert answers(tmp_path / "out.errors.jsonl")[0]["response"]["status_code"] == 500


async def test_an_answer_that_takes_too_long_is_an_error_without_a_response(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(unending=True)
    scheduler.gate.clear()
    write(tmp_path / "in.jsonl", requests(1, prompt="say hello"))
    async with served_http(scheduler) as url:
        tally = await batch(tmp_path, url, timeout=0.05).run()

    (error,) = answers(tmp_path / "out.errors.jsonl")
    assert tally.failed == 1
    assert error["response"] is None
    assert error["error"] == {"code": "request_timeout", "message": "there was no answer within 0.05 s, 3 times"}


async def test_a_server_that_cannot_serve_is_waited_for_and_then_left(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(fail_at_start=Unavailable("no live target worker"))
    write(tmp_path / "in.jsonl", requests(8, prompt="say hello"))
    async with served_http(scheduler) as url:
        with pytest.raises(StartError, match=r"no answer from .* for 0 s \(no live target worker\).* to go on"):
            await batch(tmp_path, url, patience=0.0).run()

    assert answers(tmp_path / "out.jsonl") == []
    assert not (tmp_path / "out.errors.jsonl").exists()


async def test_nobody_there_and_a_wrong_key_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", requests(2, prompt="say hello"))
    scheduler = ScriptedScheduler()
    async with served_http(scheduler, HttpConfig(api_keys=("secret",))) as url:
        with pytest.raises(StartError, match="no valid API key"):
            await batch(tmp_path, url, api_key="wrong").run()
        assert (await batch(tmp_path, url, api_key="secret").run()).answered == 2
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(StartError, match=r"no server at .*start one with `outrider up`"):
        await batch(tmp_path, url).run()


async def test_never_more_at_a_time_than_asked_for(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    scheduler.gate.clear()
    write(tmp_path / "in.jsonl", requests(12, prompt="say hello"))
    async with served_http(scheduler) as url:
        running = asyncio.create_task(batch(tmp_path, url, concurrency=5).run())
        await until(lambda: scheduler.running == 5, "five are running")
        assert len(scheduler.requests) == 5
        scheduler.gate.set()
        assert (await running).answered == 12


async def test_ctrl_c_keeps_what_is_answered_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", requests(40, prompt="say hello"))
    scheduler = ScriptedScheduler()
    async with served_http(scheduler) as url:
        running = await command(tmp_path, url, "--concurrency", "2")
        await until(lambda: len(scheduler.requests) >= 5, "some are asked")
        scheduler.gate.clear()
        await until(lambda: scheduler.running == 2, "two hang")
        os.kill(running.pid, signal.SIGINT)
        _, told = await running.communicate()
        await until(lambda: scheduler.running == 0, "the server stopped working for it")

    answered = len(answers(tmp_path / "out.jsonl"))
    assert running.returncode == ExitCode.INTERRUPTED
    assert 3 <= answered < 40
    assert told.decode().startswith(f"{answered} of 40 requests answered, ")
    assert told.decode().count("\n") == 1


async def test_the_command_names_bad_lines_and_the_file_of_errors(tmp_path: Path) -> None:
    async with served_http(ScriptedScheduler()) as url:
        (tmp_path / "in.jsonl").write_text("{}\n")
        bad = await command(tmp_path, url)
        _, told = await bad.communicate()
        assert bad.returncode == ExitCode.WRONG_USE
        assert told.decode().splitlines() == [
            f"{tmp_path}/in.jsonl line 1: custom_id: this field is required",
            f"error: {tmp_path}/in.jsonl: 1 line cannot be asked; nothing was",
        ]
        write(tmp_path / "in.jsonl", requests(1, prompt="say hello", temperature=-1))
        failed = await command(tmp_path, url)
        _, told = await failed.communicate()
    assert failed.returncode == ExitCode.FAILED
    assert told.decode().splitlines()[-1] == f"error: 1 of 1 requests failed: see {tmp_path}/out.errors.jsonl"
