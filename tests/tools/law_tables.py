"""The laws of a cell behind every path, made by the classes and functions that target worker and drafter use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdec.candidates import CandidateTree, DraftLaw
from specdec.law import Law
from tools.law_cells import DRAFT, PROMPT, STOP, TARGET, VOCABULARY_SIZE, LawCell
from tools.law_seams import DENSE_LAWS, DRAFT_LAW, QUANTISED, TARGET_LAW, Seam
from tools.table_law import Law as Table


def paths_of(depth: int) -> list[tuple[int, ...]]:
    """All paths of `depth` tokens; number i spells i in base `VOCABULARY_SIZE`."""
    return list(itertools.product(range(VOCABULARY_SIZE), repeat=depth))


def rows_of(table: Table, paths: Sequence[Sequence[int]]) -> Tensor:
    """Logits behind the prompt and each path: float32 [paths, vocab]."""
    return torch.stack([torch.tensor(table.logits([*PROMPT, *path])) for path in paths])


class LawTables:
    """target[d], draft[d]: float32 [vocab^d, vocab], behind every path of d tokens."""

    def __init__(self, cell: LawCell, depth: int) -> None:
        self.target = [self._probs(TARGET_LAW, cell, TARGET, d) for d in range(depth)]
        self.draft = [self._probs(DRAFT_LAW, cell, DRAFT, d) for d in range(depth)]
        self._laws: list[DraftLaw] = []
        self._numbers: dict[tuple[int, int, tuple[int, ...]], int] = {}

    @staticmethod
    def _probs(make: Seam, cell: LawCell, table: Table, depth: int) -> Tensor:
        paths = paths_of(depth)
        law: Law = make(cell.sampling, STOP, list(PROMPT))
        return law.probs(rows_of(table, paths), paths)

    def target_probs(self, depth: int, paths: Tensor) -> Tensor:
        """As the target worker hands them to a rule that tests ratios: float64 [rows, vocab]. paths: int64 [rows]."""
        probs = self.target[depth].double()
        return (probs / probs.sum(dim=-1, keepdim=True))[paths]

    def law_number(self, depth: int, path: int, without: tuple[int, ...]) -> int:
        """Of the draft law behind a path, after these siblings were drawn from it."""
        key = (depth, path, without)
        number = self._numbers.get(key)
        if number is None:
            if without:
                law = self._laws[self.law_number(depth, path, without[:-1])].without(without[-1])
            else:
                law = QUANTISED(self.draft[depth][path])
            self._laws.append(law)
            number = self._numbers[key] = len(self._laws) - 1
        return number

    def law(self, number: int) -> DraftLaw:
        return self._laws[number]

    def dense(self) -> tuple[Tensor, Tensor]:
        """(ids, probabilities) of all draft laws so far, [laws, M]."""
        count = len(self._laws)
        ids, probs = DENSE_LAWS(CandidateTree((0,) * count, (-1,) * count, tuple(self._laws)))
        return ids, probs


class TrueLaw:
    """What plain decoding draws, from the target's logits alone: untouched by whatever is planted in a worker."""

    def __init__(self, cell: LawCell) -> None:
        self._law = Law(cell.sampling, STOP, list(PROMPT))

    def _rows(self, depth: int) -> Tensor:
        paths = paths_of(depth)
        probs = self._law.probs(rows_of(TARGET, paths), paths).double()
        return probs / probs.sum(dim=-1, keepdim=True)

    @cached_property
    def first(self) -> Tensor:
        """Of token 1: float64 [vocab]."""
        return self._rows(0)[0]

    @cached_property
    def pairs(self) -> Tensor:
        """Of tokens 1 and 2: float64 [vocab, vocab]."""
        return self.first[:, None] * self._rows(1)

    @cached_property
    def later_pairs(self) -> Tensor:
        """Of tokens 2 and 3: float64 [vocab, vocab]."""
        size = VOCABULARY_SIZE
        return (self.pairs[:, :, None] * self._rows(2).view(size, size, size)).sum(dim=0)
