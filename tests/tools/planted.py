"""Faults in the target's speculative path, planted on purpose: plain steps stay right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import target_worker.step
from scheduler.audit import Mismatch
from specdec.candidates import CandidateTree
from specdec.engine.model import Segment
from specdec.law import Law
from target_worker.decide import Decision, decide, row_paths
from tools.table_law import TableLaw
from tools.table_model import TableModel


def shift_verify_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify judges each candidate by the row of the one before it."""
    _change_verifies(monkeypatch, lambda law, candidates, logits, log_length: logits.roll(1, dims=0))


def forbid_the_winner(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """In a verify the token at `position` of the log is the one that came second."""

    def forbidden(law: Law, candidates: CandidateTree, logits: Tensor, log_length: int) -> Tensor:
        logits = logits.clone()
        for row, path in enumerate(row_paths(candidates)):
            if log_length + len(path) == position:
                logits[row, law.draw(logits[row : row + 1], [path])] = -torch.inf
        return logits

    _change_verifies(monkeypatch, forbidden)


def _change_verifies(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Law, CandidateTree, Tensor, int], Tensor]
) -> None:
    """change: logits of the rows of a verify -> those that it is judged by."""

    def changed(law: Law, candidates: CandidateTree, logits: Tensor, log_length: int, *others: Any) -> Decision:
        if len(candidates):
            logits = change(law, candidates, logits, log_length)
        return decide(law, candidates, logits, log_length, *others)

    monkeypatch.setattr(target_worker.step, "decide", changed)


class BatchNoiseModel(TableModel):
    """A target on which every logit depends a little on how many rows share the forward: by less than `amount`."""

    def __init__(self, law: TableLaw, amount: float) -> None:
        super().__init__(law)
        self.amount = amount
        self.numeric_noise = 2 * amount

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        rows = sum(len(segment.token_ids) for segment in segments)
        shift = torch.arange(self.vocabulary_size) * 0.618 + rows * 0.414  # looks like noise, and is the same each time
        return [logits + self.amount * (2 * (shift % 1.0) - 1.0) for logits in super().forward(segments)]


class StaleKvModel(TableModel):
    """The slot of the first rejected candidate is taken for that of the token that came in its place: KV of a rejected
    candidate stays. Plain steps, which reject nothing, write what they should."""

    def __init__(self, law: TableLaw) -> None:
        super().__init__(law)
        self._rejected: dict[str, int] = {}
        self._last: dict[str, Segment] = {}

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        segments = [self._with_stale_row(segment) for segment in segments]
        self._last = {segment.sequence_id: segment for segment in segments}
        return super().forward(segments)

    def keep(self, sequence_id: str, rows: Sequence[int]) -> None:
        segment = self._last[sequence_id]
        if segment.num_logits > 1 and len(rows) < len(segment.token_ids):
            self._rejected[sequence_id] = segment.token_ids[len(rows)]
        super().keep(sequence_id, rows)

    def _with_stale_row(self, segment: Segment) -> Segment:
        stale = self._rejected.pop(segment.sequence_id, None)
        if stale is None:
            return segment
        token_ids = (stale, *segment.token_ids[1:])
        return Segment(segment.sequence_id, token_ids, segment.parents, segment.num_logits)


@dataclass(slots=True)
class Found:
    """A sink that remembers."""

    mismatches: list[Mismatch] = field(default_factory=list)

    def __call__(self, mismatch: Mismatch) -> str:
        self.mismatches.append(mismatch)
        return "remembered"
