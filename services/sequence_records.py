"""Where a sequence's record lies in Redis, and reading it back.

    outrider:seq:{ID}          hash: epoch, lengths, model, workers, state
    outrider:seq:{ID}:log      token log, 4 bytes a token, little-endian
    outrider:seq:{ID}:events   stream: what was written when, bounded

The braces are part of the keys: they are the hash tag by which a cluster keeps the three together. Writing is
`record_sequence.lua`, called by `services.metadata`.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Sequence
from typing import cast

from redis.asyncio import Redis

from scheduler.links import SequenceRecord

PREFIX = "outrider:seq:"


def sequence_keys(sequence_id: str) -> list[str]:
    """Keys of the record, its token log and its events."""
    record = f"{PREFIX}{{{sequence_id}}}"
    return [record, f"{record}:log", f"{record}:events"]


async def read_sequences(redis: Redis, limit: int) -> list[SequenceRecord]:
    """Records without their token logs. Raises what Redis raises."""
    records: list[SequenceRecord] = []
    async for key in redis.scan_iter(match=f"{PREFIX}{{*}}", count=1000, _type="HASH"):
        fields = await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(key))
        if fields:
            records.append(_record_of(key.decode(), fields, ()))
        if len(records) >= limit:
            break
    return records


async def read_sequence(redis: Redis, sequence_id: str) -> SequenceRecord | None:
    """One record with its token log; None if Redis holds none. Raises what Redis raises."""
    record_key, log_key, _ = sequence_keys(sequence_id)
    fields = await cast("Awaitable[dict[bytes, bytes]]", redis.hgetall(record_key))
    if not fields:
        return None
    log = await cast("Awaitable[bytes | None]", redis.get(log_key)) or b""
    return _record_of(record_key, fields, struct.unpack(f"<{len(log) // 4}I", log))


def _record_of(key: str, fields: dict[bytes, bytes], token_ids: Sequence[int]) -> SequenceRecord:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    return SequenceRecord(
        sequence_id=key.removeprefix(PREFIX)[1:-1],
        epoch_number=int(text["epoch_number"]),
        epoch_owner=text["epoch_owner"],
        model=text["model"],
        prompt_length=int(text["prompt_length"]),
        committed_length=int(text["committed_length"]),
        target_worker=text["target_worker"],
        draft_worker=text["draft_worker"],
        token_ids=tuple(token_ids),
    )
