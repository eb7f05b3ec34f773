"""Several streams of one request as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class _End:
    """error: why a stream ended, if not well."""

    error: Exception | None = None


async def side_by_side(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """The events of all streams, each one's in order. Raises what the first that fails raises.

    All are closed when one fails, and when nobody listens any more. A listener that is slow holds them up.
    """
    events: asyncio.Queue[Event | _End] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_forward(stream, events)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            event = await events.get()
            if not isinstance(event, _End):
                yield event
                continue
            if event.error is not None:
                raise event.error
            running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: AsyncGenerator[Event, None], events: asyncio.Queue[Event | _End]) -> None:
    end = _End()
    try:
        async with aclosing(stream):
            async for event in stream:
                await events.put(event)
    except Exception as error:
        end = _End(error)
    await events.put(end)
