"""`TableModel`: the equal fake of the language-model seam. Its logits are a `TableLaw` of what its KV holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from specdec.candidates import ROOT
from specdec.engine.model import Segment
from specdec.log import Log
from tools.table_kv import TableSequence, TableStore
from tools.table_law import Law, TableLaw


class FaultKind(Enum):
    NAN = "nan"
    """One row of logits is NaN."""
    INFINITE = "infinite"
    """One row of logits is -inf throughout."""
    RAISE = "raise"
    """The forward that holds the row raises `PlantedFault`."""


class PlantedFault(RuntimeError):
    """The exception that a `FaultKind.RAISE` throws inside forward."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Hits every row at `from_length` or later of the sequences that begin with token `marker`.

    By content and not by id, because the scheduler draws the ids.
    """

    kind: FaultKind
    marker: int
    from_length: int = 0


class TableModel:
    """Implements `specdec.engine.model.LanguageModel`.

    faults may be changed at any time. delay: seconds that each forward takes. gate: while cleared, forwards wait at
    their start; `entered` is set as soon as one does, so that a test can act while a forward runs. gated_from: only
    those wait that bring the KV of a sequence to so many tokens, so that its answer stands there, short of its end,
    until a test has acted.
    """

    def __init__(
        self,
        law: Law | None = None,
        *,
        name: str = "table",
        context_length: int = 512,
        blocks_total: int = 4096,
        page: int = 4,
        prefix_sharing: bool = True,
        faults: Sequence[Fault] = (),
        delay: float = 0.0,
    ) -> None:
        self.law: Law = law or TableLaw()
        self.name = name
        self.vocabulary_size = self.law.vocabulary_size
        self.context_length = context_length
        self.device = "cpu"
        self.dtype = "float32"
        self.numeric_noise = 0.0
        self.faults = list(faults)
        self.delay = delay
        self.gate = threading.Event()
        self.gate.set()
        self.gated_from = 0
        self.entered = threading.Event()
        self.num_forwards = 0
        self.num_rows = 0
        self.largest_batch = 0
        self._prefix_sharing = prefix_sharing
        self._store = TableStore(blocks_total, page)
        self._sequences: dict[str, TableSequence] = {}

    @property
    def blocks_used(self) -> int:
        return self._store.blocks_used

    @property
    def blocks_total(self) -> int:
        return self._store.blocks_total

    @property
    def open_sequences(self) -> int:
        return len(self._sequences)

    def hold_at(self, length: int) -> None:
        """Answers stand at so many tokens until the gate is set."""
        self.gate.clear()
        self.gated_from = length

    def open(self, sequence_id: str, log: Log) -> int:
        """Raises ValueError if the sequence is open already."""
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id} is open already")
        sequence = self._sequences[sequence_id] = TableSequence(log)
        if self._prefix_sharing:
            self._store.attach_prefix(sequence)
        return sequence.length

    def kv_length(self, sequence_id: str) -> int:
        return self._sequences[sequence_id].length

    def reserve(self, sequence_id: str, rows: int) -> bool:
        return self._store.reserve(self._sequences[sequence_id], rows)

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Raises ValueError on a segment no model could run: twice in a call, no tree, out of range, past the context,
        without room."""
        self._wait(segments)
        ids = [segment.sequence_id for segment in segments]
        if len(set(ids)) != len(ids):
            raise ValueError(f"a sequence twice in one forward: {ids}")
        for segment in segments:
            self._check(segment)
        logits = [self._run(segment) for segment in segments]
        self.num_forwards += 1
        self.num_rows += sum(len(segment.token_ids) for segment in segments)
        self.largest_batch = max(self.largest_batch, len(segments))
        return logits

    def keep(self, sequence_id: str, rows: Sequence[int]) -> None:
        """Raises ValueError if the rows are no path of the last segment from its root downwards."""
        sequence = self._sequences[sequence_id]
        above = ROOT
        for row in rows:
            if not above < row < len(sequence.parents) or sequence.parents[row] != above:
                raise ValueError(f"rows {list(rows)}: no path from the root of the last segment {sequence.parents}")
            above = row
        self._store.keep(sequence, rows)

    def truncate(self, sequence_id: str, length: int) -> None:
        self._store.truncate(self._sequences[sequence_id], length)

    def release(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._store.release(sequence)

    def check_integrity(self) -> None:
        """Raises RuntimeError if blocks are lost, double-counted or shared wrongly."""
        self._store.check(list(self._sequences.values()))

    def _wait(self, segments: Sequence[Segment]) -> None:
        if any(self.kv_length(one.sequence_id) + len(one.token_ids) >= self.gated_from for one in segments):
            self.entered.set()
            self.gate.wait()
        if self.delay:
            time.sleep(self.delay)

    def _check(self, segment: Segment) -> None:
        rows, parents = len(segment.token_ids), segment.parents
        if parents is not None and (len(parents) != rows or any(not ROOT <= p < i for i, p in enumerate(parents))):
            raise ValueError(f"parents {parents} are no tree over {rows} rows")
        if not rows or not 0 <= segment.num_logits <= rows:
            raise ValueError(f"num_logits {segment.num_logits} of {rows} rows")
        for token_id in segment.token_ids:
            if not 0 <= token_id < self.vocabulary_size:
                raise ValueError(f"token id {token_id} is not in [0, {self.vocabulary_size})")

    def _run(self, segment: Segment) -> torch.Tensor:
        sequence = self._sequences[segment.sequence_id]
        self._store.write(sequence, segment.token_ids)
        sequence.parents = segment.parents or tuple(range(-1, len(segment.token_ids) - 1))
        rows = range(len(segment.token_ids) - segment.num_logits, len(segment.token_ids))
        logits = np.empty((len(rows), self.vocabulary_size), np.float32)
        for i, row in enumerate(rows):
            logits[i] = self._row(sequence, segment, row)
        return torch.from_numpy(logits)

    def _row(self, sequence: TableSequence, segment: Segment, row: int) -> npt.NDArray[np.float32]:
        path = _path(segment, row)
        position = sequence.length + len(path)
        if position > self.context_length:
            raise ValueError(f"position {position} is past the context of {self.context_length}")
        start = max(0, sequence.length + len(path) - self.law.order)
        prefix = self._store.read(sequence, min(start, sequence.length), sequence.length)
        context = prefix + [self._store.read(sequence, sequence.length + i, sequence.length + i + 1)[0] for i in path]
        return self._with_faults(self.law.logits(context), self._first(sequence), position)

    def _first(self, sequence: TableSequence) -> int:
        return self._store.read(sequence, 0, 1)[0]

    def _with_faults(self, logits: npt.NDArray[np.float32], first: int, position: int) -> npt.NDArray[np.float32]:
        for fault in self.faults:
            if fault.marker != first or position < fault.from_length:
                continue
            if fault.kind is FaultKind.RAISE:
                raise PlantedFault(f"planted at position {position} of a sequence that begins with {first}")
            return np.full_like(logits, np.nan if fault.kind is FaultKind.NAN else -np.inf)
        return logits


def _path(segment: Segment, row: int) -> list[int]:
    """Rows from the root down to and including `row`."""
    if segment.parents is None:
        return list(range(row + 1))
    path: list[int] = []
    while row != ROOT:
        path.append(row)
        row = segment.parents[row]
    return path[::-1]
