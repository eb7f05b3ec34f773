"""The seam: a pool holds workers, keeps each of them running, and lets them end in their own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from services.pools.worker import WorkerSpec

OnLine = Callable[[str, str], None]
"""(name of a worker, a line that it wrote or that is said of it)."""


class Pool(Protocol):
    """Used from one event loop. A worker that ends by itself is started again, the longer it keeps ending the later.

    `failure` gets a ChildFailed if a worker cannot start as configured, until `settle` is called.
    """

    failure: asyncio.Future[None]

    async def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Places them and lets them start; returns before they serve. Raises StartError."""
        ...

    def settle(self) -> None:
        """The start is complete: whatever ends from now on is started again."""
        ...

    async def add(self, spec: WorkerSpec) -> None:
        """One more, under a name that is not taken. Returns when it was placed. Raises StartError."""
        ...

    async def remove(self, name: str, seconds: float) -> None:
        """Lets a worker drain for so many seconds at most, and ends it for good."""
        ...

    async def stop(self, seconds: float) -> None:
        """`remove` for all of them at once."""
        ...

    def kill(self) -> None:
        """Ends everything at once."""
        ...

    async def close(self) -> None:
        """Leaves nothing behind. Call last."""
        ...
