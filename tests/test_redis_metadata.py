"""Sequence records: newest state wins, old owners lose, and Redis may come and go without anyone noticing."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from scheduler.links import SequenceRecord
from services.embedded_redis import embedded_redis
from services.metadata import Metadata, NullRecorder, RedisRecorder
from services.redis_client import connect
from services.sequence_records import read_sequence, read_sequences, sequence_keys
from tools.waiting import until

PROMPT = (5, 6, 7)


def a_record(
    sequence_id: str = "s1", committed: int = 0, epoch: int = 1, owner: str = "scheduler-a", base: int = 100
) -> SequenceRecord:
    return SequenceRecord(
        sequence_id=sequence_id,
        epoch_number=epoch,
        epoch_owner=owner,
        model="table",
        prompt_length=len(PROMPT),
        committed_length=len(PROMPT) + committed,
        target_worker="target-1",
        draft_worker="draft-1",
        token_ids=PROMPT + tuple(range(base, base + committed)),
    )


@pytest.fixture
def socket(short_folder: Path) -> Path:
    return short_folder / "redis.sock"


@pytest.fixture
async def redis(socket: Path) -> AsyncIterator[Redis]:
    async with embedded_redis(socket=socket) as url, connect(url) as client:
        yield client


def url_of(socket: Path) -> str:
    return f"unix://{socket}"


async def holds(redis: Redis, record: SequenceRecord) -> bool:
    return await read_sequence(redis, record.sequence_id) == record


class TestBothRecorders:
    """What the scheduler may rely on, whatever the recorder."""

    @pytest.fixture(params=["null", "redis", "redis down"])
    async def recorder(self, request: pytest.FixtureRequest, socket: Path) -> AsyncIterator[Metadata]:
        async with AsyncExitStack() as stack:
            if request.param == "redis":
                await stack.enter_async_context(embedded_redis(socket=socket))
            made: Metadata = NullRecorder() if request.param == "null" else RedisRecorder(url_of(socket))
            await made.start()
            yield made
            await made.close()

    async def test_every_call_returns_at_once_and_none_fails(self, recorder: Metadata) -> None:
        recorder.record(a_record())
        recorder.record(a_record(committed=3))
        recorder.forget("s1")
        recorder.forget("never recorded")
        assert recorder.state in ("connected", "down", "off")

    async def test_listing_is_bounded_and_names_no_ended_sequence(self, recorder: Metadata) -> None:
        for name in ("ended", "a", "b", "c"):
            recorder.record(a_record(name))
        recorder.forget("ended")
        assert recorder.running(0) == []
        expected = [] if recorder.state == "off" else [a_record("a"), a_record("b")]
        assert recorder.running(2) == expected

    async def test_closing_twice_is_harmless(self, recorder: Metadata) -> None:
        await recorder.close()


@pytest.fixture
async def recorder(redis: Redis, socket: Path) -> AsyncIterator[RedisRecorder]:
    made = RedisRecorder(url_of(socket))
    await made.start()
    await until(lambda: made.state == "connected", "it holds")
    yield made
    await made.close()


async def test_a_record_reads_back_with_its_whole_log(redis: Redis, recorder: RedisRecorder) -> None:
    for committed in (0, 1, 4, 9):
        record = a_record(committed=committed)
        recorder.record(record)
        await until(lambda record=record: holds(redis, record), "it holds")  # type: ignore[misc]
    without_log = dataclasses.replace(record, token_ids=())
    assert await read_sequences(redis, 10) == [without_log]


async def test_states_of_one_moment_are_one_write_of_the_newest(redis: Redis, recorder: RedisRecorder) -> None:
    for committed in range(50):
        recorder.record(a_record(committed=committed))
    await until(lambda: holds(redis, a_record(committed=49)), "it holds")
    assert await redis.xlen(sequence_keys("s1")[2]) == 1


async def test_only_the_new_tokens_travel(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=1000))
    await until(lambda: holds(redis, a_record(committed=1000)), "it holds")
    before = (await redis.info("stats"))["total_net_input_bytes"]
    recorder.record(a_record(committed=1001))
    await until(lambda: holds(redis, a_record(committed=1001)), "it holds")
    # Polling included; the whole log alone would be 4,000 bytes.
    one_read = 150
    reads = (await redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
    assert (await redis.info("stats"))["total_net_input_bytes"] - before < 1000 + one_read * reads


async def test_a_lower_epoch_writes_nothing(redis: Redis, recorder: RedisRecorder, socket: Path) -> None:
    newer = a_record(committed=2, epoch=5, owner="scheduler-b")
    other = RedisRecorder(url_of(socket))
    await other.start()
    other.record(newer)
    await until(lambda: holds(redis, newer), "it holds")
    recorder.record(a_record(committed=9, epoch=4))
    recorder.record(a_record("marker"))
    await until(lambda: holds(redis, a_record("marker")), "it holds")
    assert await holds(redis, newer)
    await other.close()


async def test_an_equal_epoch_of_another_owner_writes_nothing(
    redis: Redis, recorder: RedisRecorder, socket: Path
) -> None:
    first = a_record(committed=2, epoch=5, owner="scheduler-b")
    other = RedisRecorder(url_of(socket))
    await other.start()
    other.record(first)
    await until(lambda: holds(redis, first), "it holds")
    recorder.record(a_record(committed=9, epoch=5, owner="scheduler-a"))
    recorder.record(a_record("marker"))
    await until(lambda: holds(redis, a_record("marker")), "it holds")
    assert await holds(redis, first)
    await other.close()


async def test_a_shorter_log_of_the_same_epoch_writes_nothing(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=7))
    await until(lambda: holds(redis, a_record(committed=7)), "it holds")
    recorder.record(a_record(committed=3))
    recorder.record(a_record("marker"))
    await until(lambda: holds(redis, a_record("marker")), "it holds")
    assert await holds(redis, a_record(committed=7))


async def test_a_higher_epoch_replaces_a_longer_log(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=7, base=100))
    await until(lambda: holds(redis, a_record(committed=7, base=100)), "it holds")
    taken_over = a_record(committed=4, epoch=2, owner="scheduler-b", base=200)
    recorder.record(taken_over)
    await until(lambda: holds(redis, taken_over), "it holds")


async def test_an_ended_sequence_expires_and_a_running_one_stays(redis: Redis, socket: Path) -> None:
    recorder = RedisRecorder(url_of(socket), finished_seconds=0.05)
    await recorder.start()
    recorder.record(a_record("ended", committed=2))
    recorder.record(a_record("running", committed=2))
    recorder.forget("ended")
    await until(lambda: holds(redis, a_record("running", committed=2)), "it holds")
    await until(lambda: gone(redis, "ended"), "it holds")
    assert all([0 < await redis.pttl(key) <= 3_600_000 for key in sequence_keys("running")])
    await recorder.close()


async def gone(redis: Redis, sequence_id: str) -> bool:
    return await redis.exists(*sequence_keys(sequence_id)) == 0


async def test_the_event_stream_tells_the_story_and_is_bounded(redis: Redis, socket: Path) -> None:
    recorder = RedisRecorder(url_of(socket), group_seconds=0.0, events_kept=50)
    await recorder.start()
    for committed in range(300):
        recorder.record(a_record(committed=committed))
        await until(lambda committed=committed: holds(redis, a_record(committed=committed)), "it holds")  # type: ignore[misc]
    recorder.forget("s1")
    events_key = sequence_keys("s1")[2]
    await until(lambda: last_event_is(redis, events_key, b"finished"), "it holds")
    assert await redis.xlen(events_key) <= 200  # trimmed by whole nodes of 100
    await recorder.close()


async def last_event_is(redis: Redis, key: str, event: bytes) -> bool:
    entries = await redis.xrevrange(key, count=1)
    fields = entries[0][1] if entries else None
    return fields is not None and fields[b"event"] == event


async def test_what_was_committed_while_redis_was_down_is_written_when_it_is_back(socket: Path) -> None:
    recorder = RedisRecorder(url_of(socket))
    await recorder.start()
    idle = a_record("idle", committed=5)
    async with embedded_redis(socket=socket) as url, connect(url) as client:
        recorder.record(idle)
        recorder.record(a_record(committed=2))
        await until(lambda: holds(client, a_record(committed=2)), "it holds")
    recorder.record(a_record(committed=3))
    await until(lambda: recorder.state == "down", "it holds")
    recorder.record(a_record(committed=8))
    async with embedded_redis(socket=socket) as url, connect(url) as client:  # another server: it lost everything
        await until(lambda: holds(client, a_record(committed=8)), "it heals")
        await until(lambda: holds(client, idle), "it heals")
        assert recorder.state == "connected"
        await recorder.close()


async def test_a_log_that_redis_lost_is_sent_again_whole(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=5))
    await until(lambda: holds(redis, a_record(committed=5)), "it holds")
    await redis.flushall()
    recorder.record(a_record(committed=6))
    await until(lambda: holds(redis, a_record(committed=6)), "it holds")


async def test_a_record_that_redis_lost_is_sent_again_whole(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=2))
    await until(lambda: holds(redis, a_record(committed=2)), "the record is written")
    await redis.delete(sequence_keys("s1")[0])
    recorder.record(a_record(committed=4))
    await until(lambda: holds(redis, a_record(committed=4)), "it is written again, with what has not changed")


async def test_a_server_that_forgot_the_script_is_told_it_anew(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=2))
    await until(lambda: holds(redis, a_record(committed=2)), "the record is written")
    await redis.script_flush()
    recorder.record(a_record(committed=4))
    await until(lambda: holds(redis, a_record(committed=4)), "so is the next one")
    assert recorder.state == "connected"


async def test_a_frozen_redis_is_noticed_and_healed(redis: Redis, recorder: RedisRecorder) -> None:
    pid = (await redis.info("server"))["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        recorder.record(a_record(committed=1))
        await until(lambda: recorder.state == "down", "it holds")
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: recorder.state == "connected", "it heals")
    await until(lambda: holds(redis, a_record(committed=1)), "it holds")


async def test_memory_is_bounded_by_the_sequences_alive(socket: Path) -> None:
    recorder = RedisRecorder(url_of(socket))
    await recorder.start()
    for number in range(10_000):
        recorder.record(a_record(f"s{number}", committed=3))
        recorder.forget(f"s{number}")
    assert recorder.state == "down"
    assert len(recorder._entries) == 0
    assert len(recorder._unwritten) == 0
    await recorder.close()


async def test_one_record_that_cannot_be_written_does_not_stop_the_others(
    redis: Redis, recorder: RedisRecorder
) -> None:
    await redis.set(sequence_keys("bad")[0], "no hash")
    recorder.record(a_record("bad"))
    recorder.record(a_record("good"))
    await until(lambda: holds(redis, a_record("good")), "it holds")
    assert recorder.state == "connected"


async def test_a_read_only_redis_counts_as_down_until_it_takes_writes(redis: Redis, recorder: RedisRecorder) -> None:
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("maxmemory", "1")
    recorder.record(a_record(committed=1))
    await until(lambda: recorder.state == "down", "it holds")
    await redis.config_set("maxmemory", "0")
    await until(lambda: holds(redis, a_record(committed=1)), "it heals")


async def test_an_end_that_redis_refused_for_a_while_is_written_later(redis: Redis, recorder: RedisRecorder) -> None:
    recorder.record(a_record(committed=1))
    await until(lambda: holds(redis, a_record(committed=1)), "it holds")
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("maxmemory", "1")
    recorder.forget("s1")
    await until(lambda: recorder.state == "down", "it holds")
    await redis.config_set("maxmemory", "0")
    await until(lambda: last_event_is(redis, sequence_keys("s1")[2], b"finished"), "it heals")


async def test_closing_writes_what_is_left(redis: Redis, socket: Path) -> None:
    recorder = RedisRecorder(url_of(socket), group_seconds=30.0)
    await recorder.start()
    await until(lambda: recorder.state == "connected", "it holds")
    record = a_record(committed=4)
    recorder.record(record)
    await recorder.close()
    assert await holds(redis, record)


async def test_the_three_keys_share_a_cluster_slot(redis: Redis) -> None:
    from redis.crc import key_slot

    assert len({key_slot(key.encode()) for key in sequence_keys("s1")}) == 1
    assert len({key_slot(sequence_keys(f"s{number}")[0].encode()) for number in range(20)}) > 10
