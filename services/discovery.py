"""Leases: how a worker tells that it is there, and how a scheduler finds out.

    outrider:worker:{id}       JSON: role, address, identity, load; expires by Redis's own clock unless it is renewed
    outrider:workers           set of ids, the index of the leases
    outrider:workers:changed   channel: told of each registration and release, so that nobody waits for the next poll

When Redis is down, or came back empty, nothing is removed: the scheduler's own streams know best who is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from redis.asyncio import Redis

from services.redis_client import REDIS_FAILURES, connect, end, one_line
from specdec.messages import Identity, Load, Role

INDEX = "outrider:workers"
CHANNEL = "outrider:workers:changed"
LEASE_SECONDS = 6.0
"""A third of it is the time between renewals, so two may fail."""
POLL_SECONDS = 0.5
GRACE_SECONDS = LEASE_SECONDS / 3 + 1.0
"""A lease must be missing for so long before its worker is removed: within it a live worker registers again after
Redis lost its data."""
RETRY_SECONDS = 0.5

logger = logging.getLogger(__name__)


def lease_key(worker_id: str) -> str:
    return f"outrider:worker:{worker_id}"


class Lease:
    """A worker's own lease. `start` returns at once and nothing here fails: without Redis it keeps trying."""

    def __init__(
        self, url: str, identity: Identity, address: str, load: Callable[[], Load], seconds: float = LEASE_SECONDS
    ) -> None:
        """address: where schedulers reach the worker. load: called at each renewal, from the event loop. Raises
        RedisUnavailable for a wrong URL."""
        self._redis: Redis = connect(url)
        self._release = self._redis.register_script(Path(__file__).with_name("release_lease.lua").read_text())
        self._identity, self._address, self._load = identity, address, load
        self._seconds = seconds
        self._token = secrets.token_hex(8)
        self._registered = False
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """Whether the last renewal reached Redis."""
        return self._registered

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="lease")

    async def close(self) -> None:
        """Gives the lease up. Without Redis it expires by itself."""
        if self._task is not None:
            await end(self._task)
            self._task = None
        if self._registered:
            self._registered = False
            with contextlib.suppress(*REDIS_FAILURES):
                await self._release(keys=[lease_key(self._identity.worker_id)], args=[self._token])
                await self._redis.publish(CHANNEL, self._identity.worker_id)
        with contextlib.suppress(*REDIS_FAILURES):
            await self._redis.aclose()

    async def _run(self) -> None:
        while True:
            try:
                await self._renew()
                await asyncio.sleep(self._seconds / 3)
            except Exception as error:  # whatever it is, the worker serves on and the lease is tried again
                if self._registered or not isinstance(error, REDIS_FAILURES):
                    logger.warning("discovery: lease of %s not renewed: %s", self._identity.worker_id, one_line(error))
                self._registered = False
                await self._redis.connection_pool.disconnect()
                await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.0))

    async def _renew(self) -> None:
        """The lease before the index: an id in the index without a lease counts as expired."""
        worker_id = self._identity.worker_id
        await self._redis.set(lease_key(worker_id), self._content(), px=round(self._seconds * 1000))
        await self._redis.sadd(INDEX, worker_id)
        if not self._registered:
            await self._redis.publish(CHANNEL, worker_id)
            logger.info("discovery: registered %s at %s", worker_id, self._address)
        self._registered = True

    def _content(self) -> str:
        identity = self._identity
        return json.dumps(
            {
                "token": self._token,
                "role": identity.role.value,
                "address": self._address,
                "identity": {
                    "worker_id": identity.worker_id,
                    "model_name": identity.model_name,
                    "vocabulary_size": identity.vocabulary_size,
                    "vocabulary_sha256": identity.vocabulary_sha256,
                    "context_length": identity.context_length,
                    "drafter": identity.drafter,
                    "version": identity.version,
                    "protocol_version": identity.protocol_version,
                },
                "load": dataclasses.asdict(self._load()),
            }
        )


@dataclass(frozen=True, slots=True)
class FoundLease:
    """A lease as a scheduler reads it. remaining: seconds by Redis's clock when it was read."""

    worker_id: str
    role: Role
    address: str
    remaining: float


class Workers(Protocol):
    """The part of `Scheduler` that a watcher tells."""

    def add_worker(self, role: Role, address: str) -> None: ...

    def remove_worker(self, address: str) -> None: ...


@dataclass(slots=True)
class _Known:
    """An address that a lease told. last_seen: time.monotonic() of the last poll that found it."""

    last_seen: float
    remaining: float = 0.0


class WorkerWatcher:
    """Tells a scheduler which workers hold a lease."""

    def __init__(
        self,
        url: str,
        workers: Workers,
        *,
        static: Iterable[str] = (),
        poll_seconds: float = POLL_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """static: addresses from the configuration, which are left alone. Raises RedisUnavailable for a wrong URL."""
        self._redis: Redis = connect(url)
        self._workers = workers
        self._static = frozenset(static)
        self._poll_seconds, self._grace_seconds = poll_seconds, grace_seconds
        self._known: dict[str, _Known] = {}
        self._nudge = asyncio.Event()
        self._reachable = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._poll(), name="discovery"),
            asyncio.create_task(self._listen(), name="discovery-nudges"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            await end(task)
        with contextlib.suppress(*REDIS_FAILURES):
            await self._redis.aclose()

    async def leases(self) -> dict[str, float]:
        """Seconds left at the last poll, by address."""
        return {address: known.remaining for address, known in self._known.items()}

    async def _poll(self) -> None:
        while True:
            try:
                found = await find_leases(self._redis)
            except Exception as error:  # nothing is known now, so nothing is removed
                self._lost(error)
                await self._redis.connection_pool.disconnect()
            else:
                self._apply(found)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._nudge.wait()
            self._nudge.clear()

    def _lost(self, error: Exception) -> None:
        if self._reachable or not isinstance(error, REDIS_FAILURES):
            logger.warning("discovery: Redis is down, workers stay as they are: %s", one_line(error))
        self._reachable = False

    def _apply(self, found: list[FoundLease]) -> None:
        now = time.monotonic()
        if not self._reachable:  # the time it was down says nothing about anyone
            for known in self._known.values():
                known.last_seen = now
        self._reachable = True
        for lease in found:
            if lease.address not in self._known and lease.address not in self._static:
                self._workers.add_worker(lease.role, lease.address)
            known = self._known.setdefault(lease.address, _Known(now))
            known.last_seen, known.remaining = now, lease.remaining
        for address, known in list(self._known.items()):
            if now - known.last_seen > self._grace_seconds:
                del self._known[address]
                if address not in self._static:
                    logger.info("discovery: the lease of %s expired", address)
                    self._workers.remove_worker(address)

    async def _listen(self) -> None:
        """Wakes the poll when a worker comes or goes; a missed message costs one poll interval."""
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await subscription.subscribe(CHANNEL)
                    while True:
                        message = await subscription.get_message(ignore_subscribe_messages=True, timeout=1.0)
                        if message is not None:
                            self._nudge.set()
            except Exception:  # the poll reports it
                await asyncio.sleep(RETRY_SECONDS)


async def find_leases(redis: Redis) -> list[FoundLease]:
    """All leases that have not expired. Forgets ids whose lease did. Raises what Redis raises."""
    members = await cast("Awaitable[set[bytes]]", redis.smembers(INDEX))
    ids = sorted(member.decode() for member in members)
    if not ids:
        return []
    async with redis.pipeline(transaction=False) as pipeline:
        for worker_id in ids:
            pipeline.get(lease_key(worker_id))
            pipeline.pttl(lease_key(worker_id))
        answers: list[Any] = await pipeline.execute()
    found: list[FoundLease] = []
    for worker_id, content, remaining in zip(ids, answers[::2], answers[1::2], strict=True):
        if content is None:
            await redis.srem(INDEX, worker_id)
        elif (lease := _read(worker_id, content, remaining)) is not None:
            found.append(lease)
    return found


def _read(worker_id: str, content: bytes, remaining: int) -> FoundLease | None:
    """None for what is no lease: whoever wrote it, it must not end discovery."""
    try:
        fields = json.loads(content)
        return FoundLease(worker_id, Role(fields["role"]), str(fields["address"]), max(remaining, 0) / 1000)
    except (ValueError, KeyError, TypeError):
        logger.warning("discovery: %s holds no lease", lease_key(worker_id))
        return None
