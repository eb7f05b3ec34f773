"""Waiting for a condition instead of sleeping for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE = 90.0
"""Seconds. It costs nothing where the thing happens, and a busy or paused machine must fail no test: on a slow one the
first worker compiles for a minute before it is ready."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, patience: float = PATIENCE) -> None:
    """Returns as soon as `condition` holds. Raises TimeoutError that names `what` after `patience` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        holds = condition()
        if isinstance(holds, Awaitable):
            holds = await holds
        if holds:
            return
        if loop.time() > deadline:
            raise TimeoutError(f"after {patience:g} s still not: {what}")
        await asyncio.sleep(0.002)
