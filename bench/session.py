"""One run of one benchmark: what is done already, what is still to do, and how much time there is for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.journal import Journal
from bench.plots import Chart
from bench.ratios import Ratio


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark found. ratios: by the names that the report shows."""

    title: str
    ratios: Mapping[str, Ratio]
    notes: str = ""
    charts: Sequence[Chart] = ()


class Session:
    """Hands out the keys that are not in the journal yet, as long as the time suffices for one more."""

    def __init__(self, name: str, journal: Journal, minutes: float) -> None:
        self.name = name
        self._journal = journal
        self._deadline = time.monotonic() + minutes * 60
        self._longest = 0.0
        self.stopped_early = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that is recorded, earlier interrupted runs included."""
        return list(self._journal.rows.values())

    def todo(self, keys: Sequence[str]) -> Iterator[str]:
        """Yields a key when it is its turn; what is yielded must be recorded before the next one is asked for."""
        for number, key in enumerate(keys, 1):
            if key in self._journal:
                continue
            left = self._deadline - time.monotonic()
            if self.rows and left < self._longest:
                self.stopped_early = f"Stopped by --minutes after {len(self.rows)} of {len(keys)}."
                self.say(self.stopped_early)
                return
            started = time.monotonic()
            yield key
            took = time.monotonic() - started
            self._longest = max(self._longest, took)
            rest = self._longest * (len(keys) - number)
            self.say(
                f"{number} of {len(keys)}: {key}, {took:.0f} s" + (f", at most {rest:.0f} s to go" if rest else "")
            )

    def record(self, key: str, row: Mapping[str, Any]) -> None:
        self._journal.record(key, row)

    def say(self, text: str) -> None:
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)
