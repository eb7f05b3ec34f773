"""Table models whose forward and drafts take a set time, as if each had hardware of its own: what is computed here
counts as part of that time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch

from bench.journal import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from specdec.candidates import CandidateTree
from specdec.drafter import Abandoned, Drafter, DraftJob, never
from specdec.engine.model import Segment
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(vocabulary_size=256, order=4, salt="bench")
"""Looks back far enough that greedy texts do not repeat themselves."""

SLICES = 10
"""A draft looks so often whether it is still wanted."""

Told = Callable[[float, float, int], None]
"""Begin and end of a forward, and how many rows decide something."""


class TimedModel(TableModel):
    """seconds: of a forward; per_row: more for each row in it."""

    def __init__(
        self, seconds: float, per_row: float = 0.0, context_length: int = 4096, told: Told | None = None
    ) -> None:
        super().__init__(LAW, context_length=context_length, blocks_total=1 << 16)
        self._seconds = seconds
        self._per_row = per_row
        self._told = told

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        began = time.perf_counter()
        logits = super().forward(segments)
        rows = sum(len(segment.token_ids) for segment in segments)
        sleep_until(began + self._seconds + rows * self._per_row)
        if self._told:
            self._told(began, time.perf_counter(), sum(segment.num_logits for segment in segments))
        return logits


class TimedDrafter:
    """What another drafter proposes, in a set time: seconds per call and more per candidate of the longest job."""

    def __init__(self, inner: Drafter, seconds: float, per_candidate: float = 0.0) -> None:
        self.name = inner.name
        self.context_length = inner.context_length
        self._inner = inner
        self._seconds = seconds
        self._per_candidate = per_candidate

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        began = time.perf_counter()
        trees = self._inner.draft(jobs)
        longest = max((job.draft_length for job in jobs), default=0)
        seconds = self._seconds + longest * self._per_candidate
        for i in range(1, SLICES + 1):
            if all(abandoned(job.sequence_id) for job in jobs):
                break
            sleep_until(began + seconds * i / SLICES)
        return trees

    def release(self, sequence_id: str) -> None:
        self._inner.release(sequence_id)


def sleep_until(moment: float) -> None:
    """On the clock of `time.perf_counter`."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
