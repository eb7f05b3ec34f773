"""The seam between a worker's loop and what computes logits: `ModelRunner` (a real model) and the table models.

A worker opens sequences, packs segments of many of them into one `forward`, and then says for each which rows to
`keep`. KV of rows that are not kept is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.log import Log


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a packed forward, appended behind its KV.

    token_ids: one per row. parents: the row that each row follows, ROOT (-1) for the KV prefix; None is a chain. A row
    attends to the KV prefix and its own path, at position kv_length + depth. num_logits: rows at the end of the segment
    whose logits are wanted; 0 for a prefill chunk that decides nothing.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    num_logits: int = 1


class LanguageModel(Protocol):
    """Called from one thread only."""

    name: str
    vocabulary_size: int
    """Real ids; logits have exactly this many columns (padding and placeholders are cut or -inf)."""
    context_length: int
    device: str
    dtype: str
    numeric_noise: float
    """By how much the gap between two logits of a row may move with what shares its forward; 0: no bit of a row depends
    on that."""

    def open(self, sequence_id: str, log: Log) -> int:
        """Starts a sequence over `log`, which the caller goes on appending to. Returns tokens found in the prefix
        cache: at most len(log) - 1, since the last token's logits are needed."""
        ...

    def kv_length(self, sequence_id: str) -> int:
        """Tokens whose KV is kept."""
        ...

    def reserve(self, sequence_id: str, rows: int) -> bool:
        """Makes room for `rows` more; False if there is none (nothing changes then)."""
        ...

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Logits per segment, float32, [num_logits, vocabulary_size]. Room must be reserved. Each row's bits depend on
        its own sequence alone. Each sequence at most once per call."""
        ...

    def keep(self, sequence_id: str, rows: Sequence[int]) -> None:
        """Keeps these rows of the sequence's last segment, a path from the root downwards, and rolls the rest back."""
        ...

    def truncate(self, sequence_id: str, length: int) -> None:
        """Rolls KV back to the first `length` tokens (no effect if it is shorter). As after `release`, full committed
        blocks stay findable."""
        ...

    def release(self, sequence_id: str) -> None:
        """Frees what the sequence holds; unknown ids are ignored. Full committed blocks stay findable until reused."""
        ...

    @property
    def blocks_used(self) -> int:
        """KV blocks referenced by open sequences."""
        ...

    @property
    def blocks_total(self) -> int: ...
