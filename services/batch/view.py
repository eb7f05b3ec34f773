"""Shows how a batch goes: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.batch.batch import Tally

LINE_SECONDS = 10.0


class BatchView:
    """Use as a context manager."""

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()
        console = Console(stderr=True)
        columns = (
            TextColumn("answered"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task("", total=None, rate="") if self._bar else None

    def __enter__(self) -> BatchView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=tally.answered, total=tally.total, rate=self.rate(tally))
        elif now - self._said >= LINE_SECONDS:
            self._said = now
            print(f"{self.state(tally)}, {self.rate(tally)}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def rate(self, tally: Tally) -> str:
        return f"{tally.tokens / max(self.seconds, 1e-3):.0f} tokens/s"

    @staticmethod
    def state(tally: Tally) -> str:
        failed = f", {tally.failed} of them failed" if tally.failed else ""
        return f"{tally.answered} of {tally.total} requests answered{failed}"
