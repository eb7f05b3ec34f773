"""`outrider batch --ray`: a real Ray on this machine, shards that are killed and go on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.batch.batch import BatchConfig
from services.batch.input_file import InputFile
from services.batch.server import ServerConfig
from tools.scripted_scheduler import ScriptedScheduler
from tools.served_http import served_http
from tools.up import ROOT, environment
from tools.waiting import until

on_ray = pytest.importorskip("services.batch.on_ray")
COUNT = 120


def write(path: Path, count: int) -> Path:
    lines = [
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"say {i}", "max_tokens": 2},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("size", [1, 100, 1000, 10**9])
def test_shards_are_all_of_the_input_in_whole_lines(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "in.jsonl", 30)
    config = BatchConfig(path, tmp_path / "out", tmp_path / "errors", ServerConfig(""))
    found = [
        request.custom_id
        for shard in on_ray.shards(path, size)
        for request in InputFile(path, shard.begin, shard.end).requests()
    ]

    assert found == [f"request-{i}" for i in range(30)]
    parts = [on_ray.part(config, shard) for shard in on_ray.shards(path, size)]
    assert len({part.output for part in parts}) == len(parts) == {1: 30, 10**9: 1}.get(size, len(parts))


async def start(folder: Path, url: str) -> asyncio.subprocess.Process:
    words = ("batch", "in.jsonl", "out", "--ray", "--shard-mb", "0.003", "--url", url, "--concurrency", "4")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", *words),
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT)),
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.slow
async def test_killed_half_way_and_resumed_each_is_answered_once_over_ray(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", COUNT)
    scheduler = ScriptedScheduler()
    async with served_http(scheduler) as url:
        first = await start(tmp_path, url)
        await until(lambda: len(scheduler.requests) >= COUNT // 4, "a part is asked", patience=60)
        scheduler.gate.clear()
        await until(lambda: scheduler.running >= 4, "some hang")
        first.kill()
        await first.communicate()
        await until(lambda: scheduler.running == 0, "Ray's processes have gone too", patience=60)
        asked_before = len(scheduler.requests)
        assert asked_before < COUNT
        scheduler.gate.set()

        second = await start(tmp_path, url)
        _, told = await second.communicate()

    assert second.returncode == 0, told.decode()
    assert f"{COUNT} of {COUNT} requests answered" in told.decode()
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    found = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert len(parts) > 2
    assert Counter(one["custom_id"] for one in found) == Counter(f"request-{i}" for i in range(COUNT))
    assert len(scheduler.requests) <= COUNT + 2 * 4  # only what was in flight is asked again
