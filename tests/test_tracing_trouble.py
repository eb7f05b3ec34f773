"""A scheduler whose collector is dead and whose disk is full answers as any other, and ends when it is told to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from outrider import AsyncClient
from specdec.messages import Role
from tools.ports import free_port
from tools.process import SECRET
from tools.short_folder import short_folder
from tools.socket_deployment import TESTS, WorkerProcess

ANSWERS = 60
MOST_GROWTH = 64 * 2**20
READY_SECONDS = 60.0
END_SECONDS = 30.0


@asynccontextmanager
async def _scheduler_in_trouble(folder: Path, target: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Every trace and metric goes to a collector that is not there, every log line to a disk that is full."""
    port, collector = free_port(), free_port()
    flags = {
        "grpc-port": port,
        "http-port": free_port(),
        "redis-socket": folder / "redis.sock",
        "targets": target,
        "otlp-endpoint": f"http://127.0.0.1:{collector}",
        "trace-sample-ratio": 1,
        "metrics-interval": 0.1,
        "log-level": "debug",
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    with open("/dev/full", "wb") as full:  # noqa: ASYNC230  # opening a device waits for nothing
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli.main", "scheduler", *arguments),
            stderr=full,
            cwd=TESTS.parent,
            env=os.environ | {"OUTRIDER_SECRET": SECRET.decode()},
        )
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready(client: AsyncClient) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            try:
                await client.complete("w1", max_tokens=1)
                return
            except Exception:  # whatever a server says that is not there yet
                await asyncio.sleep(0.05)


async def test_with_a_dead_collector_and_a_full_disk_nothing_fails() -> None:
    with short_folder() as folder:
        worker = WorkerProcess(Role.TARGET, "table_target", f"unix:{folder}/t", ())
        async with worker as target, _scheduler_in_trouble(folder, target.address) as (process, address):
            async with AsyncClient(address) as client:
                await _ready(client)
                before = psutil.Process(process.pid).memory_info().rss
                asked = [client.complete(f"w{i} w2", max_tokens=40, seed=i) for i in range(ANSWERS)]
                answers = await asyncio.gather(*asked)
                grown = psutil.Process(process.pid).memory_info().rss - before
            assert [len(answer.token_ids) for answer in answers] == [40] * ANSWERS
            assert grown < MOST_GROWTH
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), END_SECONDS)
