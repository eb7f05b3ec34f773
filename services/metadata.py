"""Sequence records in Redis, written off the per-round path: group commit, at most 50 ms behind.

Redis may come and go. What was streamed is in the scheduler's memory, so nothing here is waited for and nothing fails:
the newest state of each sequence is kept until Redis takes it, and after an outage all of them are written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from redis import exceptions
from redis.asyncio import Redis

from scheduler.links import Recorder, SequenceRecord
from services.redis_client import REDIS_FAILURES, connect, end, one_line
from services.redis_scripts import ScriptCall, call_each
from services.sequence_records import sequence_keys
from specdec.value import value

GROUP_SECONDS = 0.02
"""How long a write waits for others to share its round trip; with that trip it stays below 50 ms."""
GROUP_SIZE = 64
IDLE_CHECK_SECONDS = 1.0
MIN_BACK_OFF, MAX_BACK_OFF = 0.1, 1.0
CLOSE_SECONDS = 1.0
EVENTS_KEPT = 256
FINISHED_SECONDS = 60.0
UNFINISHED_SECONDS = 3600.0

REFUSED_FOR_NOW = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
)
"""Answers of a live server that will pass: as good as down."""

logger = logging.getLogger(__name__)


class Metadata(Recorder, Protocol):
    """A recorder with its life cycle and what `outrider status` asks of it."""

    @property
    def state(self) -> str:
        """connected, down, or off."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def running(self, limit: int) -> list[SequenceRecord]:
        """Up to `limit` sequences that were recorded and not yet forgotten, oldest first, with Redis or without."""
        ...


class NullRecorder:
    """Keeps nothing: for tests and deployments without Redis."""

    state = "off"

    def record(self, record: SequenceRecord) -> None:
        pass

    def forget(self, sequence_id: str) -> None:
        pass

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def running(self, limit: int) -> list[SequenceRecord]:
        return []


@dataclass(slots=True)
class _Entry:
    """The newest state of a sequence. written: tokens of its log that Redis holds for this epoch; None: no record.
    fields: of that record, those that seldom change."""

    record: SequenceRecord
    written: int | None = None
    finished: bool = False
    fields: Mapping[str, str | int] = field(default_factory=dict)

    def current_fields(self) -> Mapping[str, str | int]:
        record = self.record
        return {
            "model": record.model,
            "prompt_length": record.prompt_length,
            "target_worker": record.target_worker,
            "draft_worker": record.draft_worker,
            "state": "finished" if self.finished else "running",
        }


@value
class _Sent:
    """What was sent of an entry, which may have changed since."""

    entry: _Entry
    record: SequenceRecord
    finished: bool
    fields: Mapping[str, str | int]

    @classmethod
    def of(cls, entry: _Entry) -> _Sent:
        return cls(entry, entry.record, entry.finished, entry.current_fields())


class RedisRecorder:
    """Memory is bounded by the sequences alive: what ended during an outage, never having been written, is dropped."""

    def __init__(
        self,
        url: str,
        *,
        group_seconds: float = GROUP_SECONDS,
        finished_seconds: float = FINISHED_SECONDS,
        unfinished_seconds: float = UNFINISHED_SECONDS,
        events_kept: int = EVENTS_KEPT,
    ) -> None:
        """finished_seconds, unfinished_seconds: how long a record outlives its last write. Raises RedisUnavailable for
        a wrong URL."""
        self._redis: Redis = connect(url)
        self._script = self._redis.register_script(Path(__file__).with_name("record_sequence.lua").read_text())
        self._group_seconds = group_seconds
        self._finished_seconds = finished_seconds
        self._unfinished_seconds = unfinished_seconds
        self._events_kept = events_kept
        self._entries: dict[str, _Entry] = {}
        self._unwritten: dict[str, None] = {}  # a set in order of arrival
        self._wake = asyncio.Event()
        self._connected = False
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        return "connected" if self._connected else "down"

    def record(self, record: SequenceRecord) -> None:
        entry = self._entries.get(record.sequence_id)
        if entry is None:
            self._entries[record.sequence_id] = _Entry(record)
        else:
            if (record.epoch_number, record.epoch_owner) != (entry.record.epoch_number, entry.record.epoch_owner):
                entry.written = None  # another owner may have written in between: send the whole log
            entry.record = record
        self._unwritten[record.sequence_id] = None
        self._wake.set()

    def forget(self, sequence_id: str) -> None:
        entry = self._entries.get(sequence_id)
        if entry is None:
            return
        entry.finished = True
        if not self._connected and entry.written is None:
            self._drop(sequence_id)
            return
        self._unwritten[sequence_id] = None
        self._wake.set()

    async def start(self) -> None:
        """Returns at once; connecting goes on in the background."""
        self._task = asyncio.create_task(self._run(), name="metadata")

    async def close(self) -> None:
        """Writes what is left, if that takes no longer than a second."""
        if self._task is not None:
            await end(self._task)
            self._task = None
        if self._connected:
            with contextlib.suppress(*REDIS_FAILURES):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._write_all()
        self._connected = False
        with contextlib.suppress(*REDIS_FAILURES):
            await self._redis.aclose()

    def running(self, limit: int) -> list[SequenceRecord]:
        alive = (entry.record for entry in self._entries.values() if not entry.finished)
        return list(islice(alive, limit))

    async def _run(self) -> None:
        back_off = MIN_BACK_OFF
        while True:
            try:
                await self._redis.ping()
                self._came_up()
                back_off = MIN_BACK_OFF
                await self._write_as_it_comes()
            except Exception as error:  # whatever it is, recording goes on later and serving now
                self._went_down(error)
                await self._redis.connection_pool.disconnect()  # the next attempt asks anew where Redis is
                await asyncio.sleep(back_off * random.uniform(0.5, 1.0))
                back_off = min(2 * back_off, MAX_BACK_OFF)

    def _came_up(self) -> None:
        if not self._connected:
            logger.info("metadata: connected to Redis")
        self._connected = True
        self._unwritten.update(dict.fromkeys(self._entries))
        self._wake.set()

    def _went_down(self, error: Exception) -> None:
        if self._connected or not isinstance(error, REDIS_FAILURES):
            logger.warning("metadata: Redis is down, serving goes on without records: %s", one_line(error))
        self._connected = False
        never_written = [key for key, entry in self._entries.items() if entry.finished and entry.written is None]
        for sequence_id in never_written:
            self._drop(sequence_id)

    async def _write_as_it_comes(self) -> None:
        """Raises what Redis raises."""
        while True:
            try:
                async with asyncio.timeout(IDLE_CHECK_SECONDS):  # wait_for of 3.11 may swallow a cancel
                    await self._wake.wait()
            except TimeoutError:
                await self._redis.ping()
                continue
            await asyncio.sleep(self._group_seconds)
            self._wake.clear()
            await self._write_all()

    async def _write_all(self) -> None:
        while self._unwritten:
            await self._write_group([key for key, _ in zip(self._unwritten, range(GROUP_SIZE), strict=False)])

    async def _write_group(self, sequence_ids: list[str]) -> None:
        """One round trip. A sequence leaves `_unwritten` before the trip, so that what it commits meanwhile counts."""
        for sequence_id in sequence_ids:
            del self._unwritten[sequence_id]
        sent = [_Sent.of(self._entries[sequence_id]) for sequence_id in sequence_ids]
        try:
            answers = await call_each(self._redis, self._script, [self._call(each) for each in sent])
        except BaseException:
            self._unwritten.update(dict.fromkeys(sequence_ids))
            raise
        for each, answer in zip(sent, answers, strict=True):
            self._settle(each, answer)
        refused = next((answer for answer in answers if isinstance(answer, REFUSED_FOR_NOW)), None)
        if refused is not None:
            raise refused

    def _settle(self, sent: _Sent, answer: object) -> None:
        entry, record = sent.entry, sent.record
        if isinstance(answer, REFUSED_FOR_NOW):
            self._unwritten[record.sequence_id] = None
            return
        if answer == b"missing":  # Redis lost the log: send all of it
            entry.written = None
            self._unwritten[record.sequence_id] = None
            return
        if answer == b"written":
            same_epoch = entry.record.epoch_number == record.epoch_number
            entry.written = record.committed_length if same_epoch else None
            entry.fields = sent.fields
        elif answer == b"refused":
            logger.warning("metadata: a newer owner holds the record of sequence %s", record.sequence_id)
        else:
            logger.warning("metadata: record of sequence %s not written: %s", record.sequence_id, answer)
        if sent.finished:
            self._drop(record.sequence_id)

    def _call(self, sent: _Sent) -> ScriptCall:
        """Fields that Redis has already are left out: packing arguments is most of what a write costs here."""
        entry, record = sent.entry, sent.record
        base = min(entry.written or 0, record.committed_length)
        tail = record.token_ids[base : record.committed_length]
        seconds = self._finished_seconds if sent.finished else self._unfinished_seconds
        event = "finished" if sent.finished else "opened" if entry.written is None else "committed"
        arguments: list[str | int | bytes] = [
            record.epoch_number,
            record.epoch_owner,
            record.committed_length,
            base,
            struct.pack(f"<{len(tail)}I", *tail),
            round(seconds * 1000),
            self._events_kept,
            event,
        ]
        known = entry.fields if entry.written is not None else {}
        for name, content in sent.fields.items():
            if known.get(name) != content:
                arguments += (name, content)
        return ScriptCall(sequence_keys(record.sequence_id), arguments)

    def _drop(self, sequence_id: str) -> None:
        self._entries.pop(sequence_id, None)
        self._unwritten.pop(sequence_id, None)
