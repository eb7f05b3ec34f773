"""Leases come, are renewed, expire and are given up; the scheduler hears of it, and an outage removes nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from services.discovery import CHANNEL, INDEX, Lease, WorkerWatcher, find_leases, lease_key
from services.embedded_redis import embedded_redis
from services.redis_client import connect
from specdec.messages import Identity, Load, Role
from tools.waiting import until

FAST_LEASE = 0.3
RENEWED_LEASE = 1.2
"""Of a test that fails if nobody comes to renew it: the machine may be busy for most of a second."""
LONG_LEASE = 60.0
FAST_POLL = 0.02


class RecordedWorkers:
    """Stands in for a scheduler and keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.present: dict[str, Role] = {}

    def add_worker(self, role: Role, address: str) -> None:
        self.calls.append(("add", address))
        self.present[address] = role

    def remove_worker(self, address: str) -> None:
        self.calls.append(("remove", address))
        del self.present[address]


@pytest.fixture
def socket(short_folder: Path) -> Path:
    return short_folder / "redis.sock"


@pytest.fixture
async def redis(socket: Path) -> AsyncIterator[Redis]:
    async with embedded_redis(socket=socket) as url, connect(url) as client:
        yield client


def a_lease(socket: Path, worker_id: str = "target-1", role: Role = Role.TARGET, seconds: float = LONG_LEASE) -> Lease:
    identity = Identity(worker_id, role, "table", vocabulary_size=64)
    return Lease(f"unix://{socket}", identity, f"host:{worker_id}", lambda: Load(sequences=3), seconds)


@asynccontextmanager
async def watching(
    socket: Path, workers: RecordedWorkers, *, static: tuple[str, ...] = (), grace: float = 0.2, poll: float = FAST_POLL
) -> AsyncIterator[WorkerWatcher]:
    watcher = WorkerWatcher(f"unix://{socket}", workers, static=static, poll_seconds=poll, grace_seconds=grace)
    await watcher.start()
    try:
        yield watcher
    finally:
        await watcher.close()


async def subscribed(redis: Redis) -> bool:
    ((_, count),) = await redis.pubsub_numsub(CHANNEL)
    return int(count) > 0


async def test_a_lease_tells_role_address_and_load_and_expires_by_redis(redis: Redis, socket: Path) -> None:
    lease = a_lease(socket, role=Role.DRAFT)
    await lease.start()
    await until(lambda: lease.registered, "it holds")
    content = await redis.get(lease_key("target-1")) or b""
    assert b'"sequences": 3' in content
    assert b'"model_name": "table"' in content
    (found,) = await find_leases(redis)
    assert (found.worker_id, found.role, found.address) == ("target-1", Role.DRAFT, "host:target-1")
    assert 50 < found.remaining <= 60
    await lease.close()


async def test_it_is_renewed_past_its_time_and_removed_on_a_clean_exit(redis: Redis, socket: Path) -> None:
    lease = a_lease(socket, seconds=RENEWED_LEASE)
    await lease.start()
    await until(lambda: lease.registered, "it holds")
    end = time.monotonic() + 1.5 * RENEWED_LEASE
    while time.monotonic() < end:
        assert len(await find_leases(redis)) == 1
        await asyncio.sleep(0.01)
    await lease.close()
    assert await find_leases(redis) == []
    assert await redis.smembers(INDEX) == set()


async def test_a_late_exit_does_not_remove_the_lease_of_the_successor(redis: Redis, socket: Path) -> None:
    former, successor = a_lease(socket), a_lease(socket)
    await former.start()
    await until(lambda: former.registered, "it holds")
    await successor.start()
    await until(lambda: successor.registered, "it holds")
    await former.close()
    assert len(await find_leases(redis)) == 1
    await successor.close()


async def test_it_registers_again_when_redis_is_back(socket: Path) -> None:
    lease = a_lease(socket, seconds=FAST_LEASE)
    await lease.start()
    for _ in range(2):
        async with embedded_redis(socket=socket):
            await until(lambda: lease.registered, "it registers")
        await until(lambda: not lease.registered, "it notices that Redis is gone")
    await lease.close()


async def test_the_scheduler_hears_of_a_worker_and_of_its_end(redis: Redis, socket: Path) -> None:
    workers = RecordedWorkers()
    async with watching(socket, workers) as watcher:
        lease = a_lease(socket)
        await lease.start()
        await until(lambda: workers.present == {"host:target-1": Role.TARGET}, "it holds")
        remaining = await watcher.leases()
        assert 0 < remaining["host:target-1"] <= LONG_LEASE
        await lease.close()
        await until(lambda: not workers.present, "it holds")
        assert workers.calls == [("add", "host:target-1"), ("remove", "host:target-1")]


async def test_a_registration_is_heard_at_once_not_at_the_next_poll(redis: Redis, socket: Path) -> None:
    workers = RecordedWorkers()
    async with watching(socket, workers, poll=60.0):
        await until(lambda: subscribed(redis), "it holds")
        lease = a_lease(socket)
        await lease.start()
        await until(lambda: "host:target-1" in workers.present, "it is heard of", 20.0)
        await lease.close()


async def test_a_killed_worker_is_removed_when_its_lease_expired(redis: Redis, socket: Path) -> None:
    workers = RecordedWorkers()
    await redis.set(lease_key("dead"), '{"token": "t", "role": "target", "address": "host:dead"}')
    await redis.sadd(INDEX, "dead")
    async with watching(socket, workers):
        await until(lambda: "host:dead" in workers.present, "it holds")
        await redis.pexpire(lease_key("dead"), 1)
        await until(lambda: not workers.present, "it holds")
    assert await redis.smembers(INDEX) == set()


async def test_nothing_is_removed_while_redis_is_down_nor_when_it_comes_back_empty(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = RecordedWorkers()
    lease = a_lease(socket)
    await lease.start()
    passed = 0.0
    monkeypatch.setattr("services.discovery.time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
    async with watching(socket, workers, grace=60.0) as watcher:
        async with embedded_redis(socket=socket):
            await until(lambda: bool(workers.present), "it holds")
        await until(lambda: not watcher._reachable, "it holds")
        passed = 100.0  # longer than the grace: it must not count while Redis is down
        async with embedded_redis(socket=socket) as url, connect(url) as client:
            await until(lambda: watcher._reachable, "it holds")
            again = a_lease(socket)
            await again.start()
            await until(lambda: again.registered, "it holds")
            await client.ping()
            await asyncio.sleep(0.1)
            assert workers.calls == [("add", "host:target-1")]
            await again.close()
    await lease.close()


async def test_a_frozen_redis_removes_nobody(redis: Redis, socket: Path) -> None:
    workers = RecordedWorkers()
    lease = a_lease(socket)
    await lease.start()
    async with watching(socket, workers, grace=0.05) as watcher:
        await until(lambda: bool(workers.present), "it holds")
        pid = (await redis.info("server"))["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not watcher._reachable, "it holds")
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: watcher._reachable, "it holds")
        assert workers.calls == [("add", "host:target-1")]
    await lease.close()


async def test_static_addresses_are_left_alone(redis: Redis, socket: Path) -> None:
    workers = RecordedWorkers()
    async with watching(socket, workers, static=("host:target-1",)) as watcher:
        lease, other = a_lease(socket), a_lease(socket, "target-2")
        await lease.start()
        await other.start()
        await until(lambda: "host:target-2" in workers.present, "it holds")
        await until(lambda: "host:target-1" in watcher._known, "it holds")
        await lease.close()
        await until(lambda: "host:target-1" not in watcher._known, "it holds")
        assert workers.calls == [("add", "host:target-2")]
        await other.close()


async def test_garbage_under_a_lease_key_harms_nobody(redis: Redis, socket: Path) -> None:
    workers = RecordedWorkers()
    await redis.sadd(INDEX, "bad", "worse")
    await redis.set(lease_key("bad"), "no json")
    await redis.set(lease_key("worse"), '{"role": "king", "address": "x"}')
    async with watching(socket, workers):
        lease = a_lease(socket)
        await lease.start()
        await until(lambda: "host:target-1" in workers.present, "it holds")
        await lease.close()
    assert {address for _, address in workers.calls} == {"host:target-1"}
