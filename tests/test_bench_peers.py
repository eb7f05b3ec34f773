"""Peers that are servers: started, asked for streams at once, and ended with all their processes."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.contestants import ContestantFailed, Question
from bench.journal import ROOT
from bench.peers.known import PACKAGES
from bench.peers.server import ServerPeer

SCRIPT = Path(__file__).parent / "tools" / "streaming_server.py"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[int]:
    """What the server's own child writes into: "up" when it runs, and the end when it is no more."""
    os.mkfifo(tmp_path / "child")
    end = os.open(tmp_path / "child", os.O_RDONLY | os.O_NONBLOCK)
    yield end
    os.close(end)


def _next_of(child: int) -> str:
    assert select.select([child], [], [], 20)[0]
    return os.read(child, 2).decode()


def _ignored(text: str) -> None:
    pass


def _peer(folder: Path, mode: str, say: Callable[[str], None] = _ignored, start_seconds: float = 30.0) -> ServerPeer:
    command = [sys.executable, str(SCRIPT), str(folder), mode]
    return ServerPeer("other", command, dict(os.environ), say, 0.0, start_seconds)


def test_a_server_is_asked_at_once_and_ended_with_what_it_started(tmp_path: Path, child: int) -> None:
    async def ask() -> tuple[list[list[int]], str]:
        peer = _peer(tmp_path, "serve")
        try:
            await peer.start()
            answers, seconds = await peer.batch([Question("abc", 4), Question("abcde", 4)])
            assert seconds > 0
            return answers, peer.version
        finally:
            await peer.close()

    answers, version = asyncio.run(ask())
    assert answers == [[3, 4, 5, 6], [5, 6, 7, 8]]
    assert version == "1.2.3"
    assert [_next_of(child), _next_of(child)] == ["up", ""]


def test_a_server_that_does_not_start_is_told_by_its_own_last_lines(tmp_path: Path) -> None:
    async def start() -> None:
        peer = _peer(tmp_path, "broken")
        try:
            await peer.start()
        finally:
            await peer.close()

    with pytest.raises(ContestantFailed, match=r"other ended while it started\n  loading weights\n  no such model"):
        asyncio.run(start())


def test_a_server_that_never_becomes_healthy_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("bench.peers.server.TOLD_EVERY", 0.0)

    async def start() -> None:
        peer = _peer(tmp_path, "silent", said.append, start_seconds=0.3)
        try:
            await peer.start()
        finally:
            await peer.close()

    with pytest.raises(ContestantFailed, match=r"other did not start within 0\.3 s"):
        asyncio.run(start())
    assert said
    assert said[0].startswith("other starts")


KILLED = """
import asyncio, sys
from bench.peers.server import ServerPeer
asyncio.run(ServerPeer("other", sys.argv[1:], {}, print).start())
"""


def test_a_server_ends_with_a_benchmark_that_is_killed(tmp_path: Path, child: int) -> None:
    server = [sys.executable, str(SCRIPT), str(tmp_path), "silent"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    benchmark = subprocess.Popen([sys.executable, "-c", KILLED, *server], env=environment)
    assert _next_of(child) == "up"
    benchmark.kill()
    benchmark.wait()
    assert _next_of(child) == ""


def test_an_error_within_an_answer_is_no_answer(tmp_path: Path, child: int) -> None:
    async def ask() -> None:
        peer = _peer(tmp_path, "erring")
        try:
            await peer.start()
            await peer.batch([Question("abc", 4), Question("abcde", 4)])
        finally:
            await peer.close()

    with pytest.raises(ContestantFailed, match="out of blocks"):
        asyncio.run(ask())
    assert [_next_of(child), _next_of(child)] == ["up", ""]


def test_a_peer_waits_for_its_threads_as_its_makers_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", "2000")
    environment = PACKAGES["vllm"].process_environment(threads=2)
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys()
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert environment["PATH"].startswith(str(PACKAGES["vllm"].python.parent))
