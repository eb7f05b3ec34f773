"""What `outrider up` promises of its workers, whichever pool holds them: processes of this machine or actors of Ray."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outrider import AsyncClient, Tokens
from tools.up import DRAFT, ROOT, TARGET, Up, environment, outrider
from tools.waiting import PATIENCE, until

BACK_SECONDS = 10.0
"""The promise. Where the machine is so busy that all of it takes longer to start, one worker may take as long."""
CONCURRENT = 16
MAX_TOKENS = 48
DELAY = "--config {config} --delay 0.02"
RAY_LIBRARY = "_raylet"


@pytest.fixture(scope="module", params=["local", "ray"])
def up(request: pytest.FixtureRequest) -> Iterator[Up]:
    """One deployment for all tests; the last one ends it."""
    speculates = {"OUTRIDER_SCHEDULER_POLICY": "fixed"}  # goodput first looks what plain steps take
    commands = {"target": f"{TARGET} {DELAY}", "draft": f"{DRAFT} {DELAY}"}
    with Up("--pool", request.param, patience=90.0, **commands, **speculates) as running:
        running.wait_ready()
        yield running


async def answers(address: str, count: int = CONCURRENT) -> list[tuple[int, ...]]:
    """Token ids of so many requests at once, each with a prompt and a seed of its own. Raises what a request raises."""
    async with AsyncClient(address) as client:
        requests = [client.complete(f"w{i + 1} w2", max_tokens=MAX_TOKENS, seed=i) for i in range(count)]
        return [completion.token_ids for completion in await asyncio.gather(*requests)]


async def stream(address: str, came: list[list[int]]) -> None:
    """The same requests, their token ids written down as they come."""

    async def one(i: int) -> None:
        async for event in client.generate(f"w{i + 1} w2", max_tokens=MAX_TOKENS, seed=i):
            if isinstance(event, Tokens):
                came[i] += event.token_ids

    async with AsyncClient(address) as client:
        await asyncio.gather(*(one(i) for i in range(len(came))))


async def in_the_midst(address: str) -> tuple[asyncio.Task[None], list[list[int]]]:
    """All requests at once, when each answer has begun. Returns what ends with them, and their token ids."""
    came: list[list[int]] = [[] for _ in range(CONCURRENT)]
    running = asyncio.create_task(stream(address, came))
    await until(lambda: all(came) or running.done(), "all answers have begun")
    return running, came


def words(process: psutil.Process) -> set[str]:
    return set(process.cmdline())


def holder(up: Up, worker: str) -> psutil.Process:
    """The process without which a worker cannot be: its actor, or itself."""
    process = up.worker(worker)
    parent = process.parent()
    return parent if parent is not None and "WorkerActor" in " ".join(parent.cmdline()) else process


def test_a_request_is_answered_with_speculation(up: Up) -> None:
    result = outrider("generate", "w1 w2 w3", "--address", up.address, "--max-tokens", "12", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 12
    assert "mode speculative" in result.stderr


async def test_sixteen_at_once_get_the_same_as_alone(up: Up) -> None:
    together = await answers(up.address)
    async with AsyncClient(up.address) as client:
        for i in (0, CONCURRENT - 1):
            alone = await client.complete(f"w{i + 1} w2", max_tokens=MAX_TOKENS, seed=i, speculation="off")
            assert together[i] == alone.token_ids


@pytest.mark.parametrize(
    ("worker", "victim"),
    [
        ("target-1", "holder"),
        pytest.param("target-1", "process", marks=pytest.mark.slow),
        pytest.param("draft-1", "holder", marks=pytest.mark.slow),
        pytest.param("draft-1", "process", marks=pytest.mark.slow),
    ],
)
async def test_a_killed_worker_is_back_within_ten_seconds_and_no_request_fails(
    up: Up, worker: str, victim: str
) -> None:
    before = await answers(up.address)
    old = up.worker(worker)
    running, came = await in_the_midst(up.address)
    async with AsyncClient(up.address) as client:
        (holder(up, worker) if victim == "holder" else old).kill()

        async def back() -> bool:
            states = [one.state for one in (await client.status()).workers if f"{worker}.sock" in one.address]
            return states == ["ready"] and not old.is_running()

        await until(back, f"{worker} is back", patience=max(BACK_SECONDS, up.ready_after))
    await running
    assert [tuple(token_ids) for token_ids in came] == before


@pytest.mark.slow
async def test_every_worker_is_replaced_under_load_and_no_request_fails(up: Up) -> None:
    before = await answers(up.address)
    old = [up.worker("target-1"), up.worker("draft-1")]
    running, came = await in_the_midst(up.address)
    async with AsyncClient(up.address) as client:
        up.process.send_signal(signal.SIGUSR1)

        async def replaced() -> bool:
            ready = sorted(one.role for one in (await client.status()).workers if one.state == "ready")
            return ready == ["draft", "target"] and not any(process.is_running() for process in old)

        await until(replaced, "both workers are new", patience=60.0)
    await running
    assert [tuple(token_ids) for token_ids in came] == before
    assert await answers(up.address) == before


def test_no_process_that_sees_tokens_has_ray_loaded(up: Up) -> None:
    family = up.family()
    serving = [
        process for process in family if {"scheduler", "tools.table_target", "tools.table_draft"} & words(process)
    ]
    assert len(serving) == 3
    for process in serving:
        assert not any(RAY_LIBRARY in area.path for area in process.memory_maps())
    assert any(RAY_LIBRARY in area.path for area in psutil.Process(up.process.pid).memory_maps()) == any(
        "raylet" in process.name() for process in family
    )


def test_ctrl_c_drains_and_leaves_nothing_behind(up: Up) -> None:
    family = up.family()
    folder = next(
        Path(word).parent for process in family for word in process.cmdline() if word.endswith("scheduler.yaml")
    )
    question = ["generate", "w1 w2", "--address", up.address, "--max-tokens", "60", "--seed", "7"]
    whole = outrider(*question).stdout
    with subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", *question],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(),
    ) as asking:
        assert asking.stdout is not None
        first = asking.stdout.read(1)
        target = up.worker("target-1")
        target.suspend()  # so that the answer does not end before the deployment was told to
        up.process.send_signal(signal.SIGTERM)
        up.wait_for("draining 1 sequences")
        target.resume()
        rest = asking.stdout.read()
    assert (asking.returncode, first + rest) == (0, whole)
    assert up.end() == 0
    _gone(family, folder)


def _gone(family: list[psutil.Process], folder: Path) -> None:
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    for process in alive:
        process.kill()
    assert [process.name() for process in alive] == []
    assert not folder.exists()
