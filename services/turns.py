"""Workers that share a host's cores take turns: an advisory file lock, held for one forward.

A killed holder frees the lock. Nobody waits for it without limit: a frozen holder must not hold the others up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.log import Log

if TYPE_CHECKING:
    import torch

    from specdec.engine.model import LanguageModel, Segment

POLL_SECONDS = 0.0005
FIRST_PATIENCE = 1.0
"""Seconds to wait before the usual length of a forward is known."""
TARGET_PATIENCE = 2.0
DRAFT_PATIENCE = 20.0
"""Longest wait, as a multiple of one's own usual forward. A late draft harms nobody, so drafters wait longer."""
_WEIGHT_OF_NEWEST = 0.2


def default_path() -> Path:
    """The lock that all workers of this user on this host share."""
    return Path(tempfile.gettempdir()) / f"outrider-cpu-{os.getuid()}.lock"


class CpuTurn:
    """The host-wide lock, as one process uses it. Not for several threads."""

    def __init__(self, path: Path, patience: float) -> None:
        """patience: longest wait, as a multiple of the usual time for which this process holds the lock.

        Raises OSError if the file cannot be opened.
        """
        self.patience = patience
        self.usual_seconds: float | None = None
        self.waits_given_up = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def name(self) -> str:
        """The same for all processes that share the lock, and for no others."""
        file = os.fstat(self._file)
        return f"{socket.gethostname()}:{file.st_dev}:{file.st_ino}"

    @property
    def longest_wait(self) -> float:
        return FIRST_PATIENCE if self.usual_seconds is None else self.patience * self.usual_seconds

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Runs the body in turn; False if the wait was given up and it runs beside another one."""
        owns = self._acquire()
        start = time.monotonic()
        try:
            yield owns
        finally:
            if owns:  # a forward beside another one is no measure of the usual one
                self._learn(time.monotonic() - start)
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)

    def _acquire(self) -> bool:
        give_up = time.monotonic() + self.longest_wait
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    self.waits_given_up += 1
                    return False
                time.sleep(POLL_SECONDS)

    def _learn(self, seconds: float) -> None:
        usual = seconds if self.usual_seconds is None else self.usual_seconds
        self.usual_seconds = usual + _WEIGHT_OF_NEWEST * (seconds - usual)


class TakingTurns:
    """A `LanguageModel` whose forwards wait for their turn."""

    def __init__(self, model: LanguageModel, turn: CpuTurn) -> None:
        self._model = model
        self._turn = turn
        self.name = model.name
        self.vocabulary_size = model.vocabulary_size
        self.context_length = model.context_length
        self.device = model.device
        self.dtype = model.dtype
        self.numeric_noise = model.numeric_noise
        self.turns = turn.name

    def open(self, sequence_id: str, log: Log) -> int:
        return self._model.open(sequence_id, log)

    def kv_length(self, sequence_id: str) -> int:
        return self._model.kv_length(sequence_id)

    def reserve(self, sequence_id: str, rows: int) -> bool:
        return self._model.reserve(sequence_id, rows)

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        with self._turn.held():
            return self._model.forward(segments)

    def keep(self, sequence_id: str, rows: Sequence[int]) -> None:
        self._model.keep(sequence_id, rows)

    def truncate(self, sequence_id: str, length: int) -> None:
        self._model.truncate(sequence_id, length)

    def release(self, sequence_id: str) -> None:
        self._model.release(sequence_id)

    @property
    def blocks_used(self) -> int:
        return self._model.blocks_used

    @property
    def blocks_total(self) -> int:
        return self._model.blocks_total
