"""The seams between the scheduler and what is outside its process: worker links and the metadata recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, Union

from specdec.messages import (
    DraftItem,
    DraftResult,
    Identity,
    Load,
    Role,
    TargetItem,
    TargetResult,
    TokenizerBundle,
)
from specdec.value import value

Item = TypeVar("Item", TargetItem, DraftItem, contravariant=True)
Result = TypeVar("Result", TargetResult, DraftResult, covariant=True)


class LinkError(Exception):
    """The worker cannot be reached, or the stream broke. The message is fit for a log line."""


class WorkerLink(Protocol[Item, Result]):
    """One worker as the scheduler sees it: one stream that multiplexes sequences. Used from the event loop only."""

    address: str

    async def identify(self) -> Identity:
        """Who the worker is. Raises LinkError."""
        ...

    async def id_digests(self, run: int) -> bytes:
        """ID_DIGEST_BYTES for each id of a run of its vocabulary; empty if it cannot tell. Raises LinkError."""
        ...

    async def open(self, deliver: Callable[[Sequence[Result]], None], lost: Callable[[str], None]) -> None:
        """Starts the stream. `deliver` gets each batch of results; `lost` is called once, with the cause, when the
        stream breaks for any reason but `close`. Raises LinkError."""
        ...

    def send(self, items: Sequence[Item]) -> None:
        """Queues items; never blocks. Items queued in one turn of the event loop travel in one message. After the
        stream was lost they are dropped."""
        ...

    async def load(self) -> Load:
        """The worker's counters. Raises LinkError."""
        ...

    async def close(self) -> None: ...


class TargetLink(WorkerLink[TargetItem, TargetResult], Protocol):
    async def tokenizer(self) -> TokenizerBundle:
        """Raises LinkError."""
        ...


DraftLink = WorkerLink[DraftItem, DraftResult]

AnyLink = Union[TargetLink, DraftLink]
LinkFactory = Callable[[Role, str], AnyLink]


@value
class SequenceRecord:
    """What Redis is told of a sequence: enough to show it, and to resume it."""

    sequence_id: str
    epoch_number: int
    epoch_owner: str
    model: str
    prompt_length: int
    committed_length: int
    target_worker: str
    draft_worker: str
    token_ids: Sequence[int]
    """The log; it may have grown since, so `committed_length` of them count."""


class Recorder(Protocol):
    """Records metadata off the per-round path: every call returns at once and none fails."""

    def record(self, record: SequenceRecord) -> None:
        """Newest state of a sequence; may be grouped with later ones."""
        ...

    def forget(self, sequence_id: str) -> None: ...
