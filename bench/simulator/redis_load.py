"""What the metadata of a fleet costs Redis: seconds of its one thread, by its own account, for what we send."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from bench.journal import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from redis.asyncio import Redis

from scheduler.links import SequenceRecord
from services.discovery import Lease, find_leases
from services.embedded_redis import embedded_redis
from services.metadata import RedisRecorder
from services.redis_client import connect
from specdec.messages import Load
from tools.identities import target_identity
from tools.waiting import until

SEQUENCES, GROWTHS = 64, 60
WORKERS, POLLS, RENEWALS = 100, 60, 10


@dataclass(frozen=True, slots=True)
class RedisCosts:
    """Seconds of Redis's main thread: to record one growth of a sequence; to renew a lease; to read one in a poll."""

    record: float
    renew: float
    read: float


async def measure() -> RedisCosts:
    async with embedded_redis() as url:
        redis = connect(url)
        try:
            record = await _record(redis, url)
            renew = await _renew(redis, url)
            before = await _cpu(redis)
            for _ in range(POLLS):
                await find_leases(redis)
            read = (await _cpu(redis) - before) / POLLS / WORKERS
            return RedisCosts(record, renew, read)
        finally:
            await redis.aclose()


async def _record(redis: Redis, url: str) -> float:
    recorder = RedisRecorder(url)
    await recorder.start()
    tokens = list(range(100 + 4 * GROWTHS))
    records = [SequenceRecord(f"sequence-{i}", 1, "s", "m", 100, 100, "t", "d", tokens) for i in range(SEQUENCES)]
    calls, before = await _calls(redis, "evalsha"), await _cpu(redis)
    for growth in range(GROWTHS):
        for record in records:
            recorder.record(replace(record, committed_length=100 + 4 * growth))
        await until(lambda: not recorder._unwritten, "the group is written")
    await recorder.close()
    return (await _cpu(redis) - before) / (await _calls(redis, "evalsha") - calls)


async def _renew(redis: Redis, url: str) -> float:
    """Of leases that are registered already."""
    leases = [
        Lease(url, replace(target_identity("t"), worker_id=f"worker-{i}"), "10.0.0.1:1", Load) for i in range(WORKERS)
    ]
    for lease in leases:
        await lease._renew()
    before = await _cpu(redis)
    for _ in range(RENEWALS):
        for lease in leases:
            await lease._renew()
    spent = await _cpu(redis) - before
    for lease in leases:
        await lease._redis.aclose()
    return spent / WORKERS / RENEWALS


async def _calls(redis: Redis, command: str) -> int:
    stats: dict[str, Any] = await redis.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


async def _cpu(redis: Redis) -> float:
    info = await redis.info("cpu")
    return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])
