"""Results forged on their way: what a broken or hostile worker could send, as functions from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.candidates import CandidateTree
from specdec.messages import DraftBlock, DraftItem, DraftResult, Epoch, Identity, Load
from tools.network import Worker

Meddle = Callable[[list[DraftResult]], list[DraftResult]]


def untouched(results: list[DraftResult]) -> list[DraftResult]:
    return results


def mute(results: list[DraftResult]) -> list[DraftResult]:
    return []


def duplicated(results: list[DraftResult]) -> list[DraftResult]:
    """Every block twice."""
    return [result for result in results for _ in range(2)]


def late_duplicates() -> Meddle:
    """Behind every batch, the one before again."""
    before: list[DraftResult] = []

    def meddle(results: list[DraftResult]) -> list[DraftResult]:
        nonlocal before
        batch, before = [*results, *before], results
        return batch

    return meddle


def old_epoch(results: list[DraftResult]) -> list[DraftResult]:
    """Before every block a wrong one of a lower epoch."""
    return _forged(results, lambda result: {"epoch": Epoch(result.header.epoch.number - 1, result.header.epoch.owner)})


def foreign_owner(results: list[DraftResult]) -> list[DraftResult]:
    """Before every block a wrong one of another owner at the same number."""
    return _forged(results, lambda result: {"epoch": Epoch(result.header.epoch.number, "somebody else")})


def foreign_sequence(results: list[DraftResult]) -> list[DraftResult]:
    """Before every block a wrong one of a sequence that does not exist."""
    return _forged(results, lambda result: {"sequence_id": "nobody's"})


def base_beyond(results: list[DraftResult]) -> list[DraftResult]:
    """Before every block a wrong one on a log that is not that long yet."""
    return _forged(results, lambda result: {"base_length": result.header.base_length + 1000})


def wrong_digest(results: list[DraftResult]) -> list[DraftResult]:
    """Before every block a wrong one on another text of the same length."""
    return _forged(results, lambda result: {"prefix_digest": bytes(16)})


def _forged(results: list[DraftResult], change: Callable[[DraftResult], dict[str, object]]) -> list[DraftResult]:
    batch: list[DraftResult] = []
    for result in results:
        if isinstance(result.body, DraftBlock):
            header = replace(result.header, **change(result))  # type: ignore[arg-type]
            batch.append(DraftResult(header, DraftBlock(CandidateTree.chain([0, 1, 2, 3]))))
        batch.append(result)
    return batch


MEDDLES: dict[str, Callable[[], Meddle]] = {
    "untouched": lambda: untouched,
    "mute": lambda: mute,
    "duplicated": lambda: duplicated,
    "late_duplicates": late_duplicates,
    "old_epoch": lambda: old_epoch,
    "foreign_owner": lambda: foreign_owner,
    "foreign_sequence": lambda: foreign_sequence,
    "base_beyond": lambda: base_beyond,
    "wrong_digest": lambda: wrong_digest,
}
"""By name, for the command line."""


class MeddlingWorker:
    """A draft worker whose results pass through `meddle`."""

    def __init__(self, inner: Worker[DraftItem, DraftResult], meddle: Meddle) -> None:
        self.identity: Identity = inner.identity
        self.crash: Exception | None = None
        self._inner = inner
        self._meddle = meddle

    def start(self) -> None:
        self._inner.start()

    def stop(self) -> None:
        self._inner.stop()

    def attach(self, deliver: Callable[[list[DraftResult]], None]) -> int:
        def forged(results: list[DraftResult]) -> None:
            if batch := self._meddle(results):
                deliver(batch)

        return self._inner.attach(forged)

    def submit(self, session: int, items: Sequence[DraftItem]) -> None:
        self._inner.submit(session, items)

    def detach(self, session: int) -> None:
        self._inner.detach(session)

    def drain(self) -> None:
        self._inner.drain()

    def load(self) -> Load:
        return self._inner.load()
