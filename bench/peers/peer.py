"""What every peer can do."""

from __future__ import annotations

from typing import Protocol

from bench.contestants import Batching, Contestant


class Peer(Contestant, Batching, Protocol):
    """A contestant of another engine. version: its engine's, "" before it has started."""

    version: str

    async def start(self) -> None:
        """Raises ContestantFailed."""
        ...

    async def close(self) -> None:
        """Also of one that did not start, or not wholly."""
        ...
