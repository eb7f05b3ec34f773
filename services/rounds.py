"""The latest sequences' journals, for `outrider explain`, `trace` and `report`, and as a feed for the page."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scheduler.entries import Admitted, Dropped, Ended, Entry, FellBack, Placed, Step
from services.rounds_figures import LiveFigures

MAX_ENTRIES = 32_768
"""Of all sequences together: some 30 MB."""
MAX_ENDED = 256
"""Ended sequences that are remembered."""
MAX_WAITING = 4_096
"""Entries that a feed holds for a reader who is slow; then it loses the oldest."""
LATEST = "last"
"""In place of a request's name: the one that was admitted last."""

Later = Placed | Step | Dropped | FellBack | Ended


@dataclass(slots=True)
class SequenceRounds:
    """forgotten: how many of its oldest entries are no longer here."""

    admitted: Admitted
    entries: deque[Later] = field(default_factory=deque)
    forgotten: int = 0


class RoundStore:
    """`read` is a reader of the scheduler's journals. Bounded: ended sequences are forgotten first, oldest first.

    figures: what all of them were like lately.
    """

    def __init__(
        self, max_entries: int = MAX_ENTRIES, max_ended: int = MAX_ENDED, max_waiting: int = MAX_WAITING
    ) -> None:
        self._max_entries = max_entries
        self._max_ended = max_ended
        self._max_waiting = max_waiting
        self._running: OrderedDict[str, SequenceRounds] = OrderedDict()
        self._ended: OrderedDict[str, SequenceRounds] = OrderedDict()
        self._count = 0
        self._feeds: set[Feed] = set()
        self.figures = LiveFigures()

    def read(self, entry: Entry) -> None:
        if isinstance(entry, Admitted):
            self._running[entry.sequence_id] = SequenceRounds(entry)
        elif (rounds := self._running.get(entry.sequence_id)) is not None:
            rounds.entries.append(entry)
            if isinstance(entry, Ended):
                self._ended[entry.sequence_id] = self._running.pop(entry.sequence_id)
        self._count += 1
        if self._count > self._max_entries or len(self._ended) > self._max_ended:
            self._forget()
        self.figures.read(entry)
        for feed in self._feeds:
            feed.put(entry)

    def sequences(self) -> list[SequenceRounds]:
        """All that is remembered, in the order of admission."""
        every = [*self._ended.values(), *self._running.values()]
        return sorted(every, key=lambda rounds: rounds.admitted.at)

    def sequence(self, sequence_id: str) -> SequenceRounds | None:
        return self._running.get(sequence_id) or self._ended.get(sequence_id)

    def find(self, request: str) -> list[SequenceRounds]:
        """request: the id of a sequence, or of a request, whose choices are a sequence each; or `LATEST`."""
        one = self.sequence(request)
        if one is not None:
            return [one]
        every = self.sequences()
        if request == LATEST:
            return every[-1:]
        return [rounds for rounds in every if rounds.admitted.request_id == request]

    def since(self, at: float) -> list[SequenceRounds]:
        """Those of which something happened at `at` (monotonic seconds) or later."""
        return [rounds for rounds in self.sequences() if _last(rounds).at >= at]

    @contextmanager
    def feed(self) -> Iterator[Feed]:
        """Everything from now on."""
        feed = Feed(self._max_waiting)
        self._feeds.add(feed)
        try:
            yield feed
        finally:
            self._feeds.discard(feed)

    def close(self) -> None:
        """Ends every feed."""
        for feed in self._feeds:
            feed.close()

    def _forget(self) -> None:
        while len(self._ended) > self._max_ended or (self._ended and self._count > self._max_entries):
            self._count -= 1 + len(self._ended.popitem(last=False)[1].entries)
        while self._count > self._max_entries and (longest := self._longest()) is not None:
            longest.entries.popleft()
            longest.forgotten += 1
            self._count -= 1

    def _longest(self) -> SequenceRounds | None:
        """Of the running ones; only asked when these alone are too much."""
        longest = max(self._running.values(), key=lambda rounds: len(rounds.entries), default=None)
        return longest if longest is not None and longest.entries else None


class Feed:
    """What one reader has not taken yet. lost: entries that it was too slow for."""

    def __init__(self, limit: int) -> None:
        self._waiting: deque[Entry] = deque(maxlen=limit)
        self._new = asyncio.Event()
        self.lost = 0
        self.closed = False

    def put(self, entry: Entry) -> None:
        self.lost += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(entry)
        self._new.set()

    def close(self) -> None:
        self.closed = True
        self._new.set()

    async def take(self, patience: float) -> list[Entry]:
        """All that came; waits `patience` seconds for the first. Empty: nothing came, or the feed is closed."""
        try:
            async with asyncio.timeout(patience):
                await self._new.wait()
        except TimeoutError:
            pass
        taken = list(self._waiting)
        self._waiting.clear()
        if not self.closed:
            self._new.clear()
        return taken


def _last(rounds: SequenceRounds) -> Entry:
    return rounds.entries[-1] if rounds.entries else rounds.admitted
