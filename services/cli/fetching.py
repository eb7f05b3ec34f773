"""Shows how the fetching of a model goes: a bar on a terminal, else a line per stage."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from services.models import ModelNotAvailable, Progress, Stage, resolve
from services.start_error import StartError


class FetchView:
    """Takes `Progress` of one model. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage: Stage | None = None
        self._start = time.monotonic()
        self._task: TaskID | None = None
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> FetchView:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        if self._stage is not None:
            print(f"{self._name}: there after {time.monotonic() - self._start:.1f} s", file=sys.stderr)

    def __call__(self, progress: Progress) -> None:
        text = f"{self._name}: {progress.stage.value}"
        new = progress.stage is not self._stage
        self._stage = progress.stage
        if self._bars is None:
            if new:
                size = f" ({progress.total_bytes / 1e6:.0f} MB)" if progress.total_bytes else ""
                print(text + size, file=sys.stderr, flush=True)
            return
        if new or self._task is None:
            self._task = self._bars.add_task(text, total=progress.total_bytes or None)
        self._bars.update(self._task, completed=progress.done_bytes, total=progress.total_bytes or None)


def fetch_shown(name: str) -> Path:
    """Folder of a model, fetched with its progress shown if it is a named source that is missing. Raises StartError."""
    view = FetchView(name)
    try:
        with view:
            return resolve(name, fetch=True, progress=view)
    except ModelNotAvailable as error:
        raise StartError(str(error)) from error
