"""The scheduler process whole, with all that it serves, and a target worker process for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.scheduler_process import serve_scheduler
from services.settings import SchedulerSettings
from services.start_error import StartError
from specdec.messages import Role
from tools.process import SECRET
from tools.short_folder import short_folder
from tools.socket_deployment import WorkerProcess
from tools.waiting import PATIENCE


def process_settings(folder: Path, **changes: object) -> SchedulerSettings:
    """Of a process on free ports, with a Redis of its own in `folder`."""
    values = {
        "grpc_port": 0,
        "http_port": 0,
        "secret": SECRET.decode(),
        "redis_socket": folder / "redis.sock",
        "drain_timeout": 15.0,
    }
    return SchedulerSettings(**{**values, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ServedProcess:
    """address: of gRPC; url: of HTTP. `stop` begins its end, which `task` reaches."""

    address: str
    url: str
    stop: asyncio.Event
    task: asyncio.Task[None]


@asynccontextmanager
async def served_process(config: SchedulerSettings) -> AsyncIterator[ServedProcess]:
    """It is told to stop at the end, and must. Raises StartError if it cannot serve."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    url: asyncio.Future[str] = loop.create_future()
    address: asyncio.Future[str] = loop.create_future()

    async def on_http_ready(told: str) -> None:
        url.set_result(told)

    async def on_ready(told: str) -> None:
        address.set_result(told)

    task = asyncio.create_task(serve_scheduler(config, on_http_ready=on_http_ready, on_ready=on_ready, stop=stop))
    either: list[asyncio.Future[Any]] = [task, address]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield ServedProcess(address.result(), url.result(), stop, task)
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await task


async def refusal(config: SchedulerSettings) -> StartError:
    """Why the process does not start: one line."""
    with pytest.raises(StartError) as caught:
        await serve_scheduler(config)
    assert "\n" not in str(caught.value)
    return caught.value


def table_target(folder: Path, *arguments: str) -> WorkerProcess:
    return WorkerProcess(Role.TARGET, "table_target", f"unix:{folder}/t0", ["--worker-id", "target-0", *arguments])


@contextmanager
def shared_target() -> Iterator[WorkerProcess]:
    """For all tests of a file that neither kill it nor fill it. Slow enough that an answer can be met half way."""
    with short_folder() as folder:
        worker = table_target(folder, "--delay", "0.02")
        try:
            asyncio.run(worker.start())
            yield worker
        finally:
            asyncio.run(worker.kill())
