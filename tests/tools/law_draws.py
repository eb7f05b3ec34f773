"""Many answers of one cell at once, drawn by the functions that the target worker and the drafter call.

Only the loop is another one: tables of laws instead of a model, tensors of rows instead of sequences. Rounds, shapes
and the room that is left are those of the workers, so that for the same seeds the answers are the same
(test_law_draws.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.candidates import ROOT, CandidateTree
from specdec.params import AcceptRule
from tools.law_cells import ANSWER_LENGTH, PROMPT, VOCABULARY_SIZE, LawCell
from tools.law_chances import Chances, SeedColumn, many_seeds
from tools.law_seams import (
    ACCEPT_BLOCK,
    ACCEPT_INVARIANT,
    ACCEPT_REJECTION,
    DRAW_CANDIDATE,
    EXPONENTIAL,
    RANDOM_WORDS,
)
from tools.law_tables import LawTables


@dataclass
class Answers:
    """token_ids: int64 [answers, ANSWER_LENGTH]. accepted: of each answer, candidates that became tokens."""

    token_ids: Tensor
    accepted: Tensor


@dataclass
class _Block:
    """The same tree shape for many rows. laws: number of each candidate's law, [rows, n]."""

    parents: tuple[int, ...]
    token_ids: Tensor  # [rows, n]
    laws: Tensor  # [rows, n]
    paths: Tensor  # [rows, 1 + n], number of the path to the base and to each candidate

    @property
    def depths(self) -> tuple[int, ...]:
        return CandidateTree((0,) * len(self.parents), self.parents).depths


class Draws:
    """Draws answers under the rules that test ratios."""

    def __init__(self, cell: LawCell, count: int, chances: Chances) -> None:
        self._cell = cell
        self._chances = chances
        self._tables = LawTables(cell, ANSWER_LENGTH)
        self._tokens = torch.zeros(count, ANSWER_LENGTH, dtype=torch.long)
        self._length = torch.zeros(count, dtype=torch.long)
        self._accepted = torch.zeros(count, dtype=torch.long)

    def run(self) -> Answers:
        for depth in range(ANSWER_LENGTH):
            rows = (self._length == depth).nonzero().squeeze(-1)
            if len(rows):
                self._round(depth, rows)
        return Answers(self._tokens, self._accepted)

    def _round(self, depth: int, rows: Tensor) -> None:
        """Drafts and verifies what fits: the last token needs no candidate."""
        block = self._draft(depth, rows, ANSWER_LENGTH - 1 - depth)
        self._commit(depth, rows, block, *self._verify(depth, rows, block))

    def _draft(self, depth: int, rows: Tensor, levels: int) -> _Block:
        base = path_numbers(self._tokens[rows, :depth])
        columns: list[Tensor] = []
        laws: list[Tensor] = []
        paths, parents = [base], []
        parent, path = ROOT, base
        chances = self._draft_chances(depth, rows, levels) if levels else torch.empty(0)
        for level in range(levels):
            first = len(columns)
            drawn, numbers = self._siblings(depth + level, path, chances, level, rows)
            columns += drawn
            laws += numbers
            parents += [parent] * len(drawn)
            paths += [path * VOCABULARY_SIZE + token for token in drawn]
            parent, path = first, paths[1 + first]
        empty = torch.zeros(len(rows), 0, dtype=torch.long)
        return _Block(
            tuple(parents),
            torch.stack(columns, dim=-1) if columns else empty,
            torch.stack(laws, dim=-1) if laws else empty,
            torch.stack(paths, dim=-1),
        )

    def _draft_chances(self, depth: int, rows: Tensor, levels: int) -> Tensor:
        return self._chances.draft(len(PROMPT) + depth, rows, levels, self._cell.width)

    def _siblings(
        self, depth: int, paths: Tensor, chances: Tensor, level: int, rows: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Drawn without replacement; with the numbers of their laws."""
        tables, width, draw = self._tables, self._cell.width, DRAW_CANDIDATE.now
        drawn: list[list[int]] = [[] for _ in range(width)]
        numbers: list[list[int]] = [[] for _ in range(width)]
        for path, uniforms in zip(paths.tolist(), chances[:, level].tolist(), strict=True):
            without: tuple[int, ...] = ()
            for sibling, uniform in enumerate(uniforms):
                number = tables.law_number(depth, path, without)
                token_id = draw(tables.law(number), uniform)
                drawn[sibling].append(token_id)
                numbers[sibling].append(number)
                without = (*without, token_id)
        return [torch.tensor(column) for column in drawn], [torch.tensor(column) for column in numbers]

    def _verify(self, depth: int, rows: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        """(last accepted node, token behind it), as the rule says."""
        base_length, count = len(PROMPT) + depth, len(block.parents)
        all_ids, all_probs = self._tables.dense() if count else (torch.zeros(1, 1).long(), torch.zeros(1, 1).double())
        laws = (all_ids[block.laws], all_probs[block.laws])
        behind = [self._tables.target_probs(depth, block.paths[:, 0])]
        behind += [self._tables.target_probs(depth + 1 + d, block.paths[:, 1 + i]) for i, d in enumerate(block.depths)]
        chances = (self._chances.accept(base_length, rows, count), self._chances.residual(base_length, rows))
        arguments = (block.token_ids, *laws, torch.stack(behind, dim=1), *chances)
        if self._cell.sampling.accept_rule is AcceptRule.BLOCK:
            node, token_id = ACCEPT_BLOCK(*arguments)
        else:
            node, token_id = ACCEPT_REJECTION(block.parents, *arguments)
        return node, token_id

    def _commit(self, depth: int, rows: Tensor, block: _Block, node: Tensor, token_id: Tensor) -> None:
        tree = CandidateTree((0,) * len(block.parents), block.parents)
        for end in range(ROOT, len(block.parents)):
            ended = node == end
            path, here = tree.path(end), rows[ended]
            for offset, candidate in enumerate(path):
                self._tokens[here, depth + offset] = block.token_ids[ended, candidate]
            self._tokens[here, depth + len(path)] = token_id[ended]
            self._length[here] += len(path) + 1
            self._accepted[here] += len(path)


class InvariantDraws(Draws):
    """Draws answers under `invariant`, one seed each."""

    def __init__(self, cell: LawCell, seeds: list[int]) -> None:
        self._seeds = SeedColumn(seeds)
        super().__init__(cell, len(seeds), _NoChances())

    def run(self) -> Answers:
        with many_seeds():
            return super().run()

    def _draft_chances(self, depth: int, rows: Tensor, levels: int) -> Tensor:
        return torch.empty(0)

    def _siblings(
        self, depth: int, paths: Tensor, chances: Tensor, level: int, rows: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        scores = self._perturbed(self._tables.draft[depth][paths], depth, rows)
        best = scores.topk(self._cell.width, dim=-1).indices
        return list(best.unbind(dim=-1)), list(torch.zeros_like(best).unbind(dim=-1))

    def _verify(self, depth: int, rows: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        wanted = [self._target_tokens(depth, block.paths[:, 0], rows)]
        wanted += [self._target_tokens(depth + 1 + d, block.paths[:, 1 + i], rows) for i, d in enumerate(block.depths)]
        count = len(block.parents)
        cases = torch.cat([block.token_ids, torch.stack(wanted, dim=-1)], dim=-1)
        numbers, which = torch.unique(path_numbers(cases), return_inverse=True)
        first = torch.zeros_like(numbers).scatter_(0, which, torch.arange(len(cases)))
        ends: list[tuple[int, int]] = []
        accept = ACCEPT_INVARIANT.now
        for case in cases[first].tolist():
            tree = CandidateTree(tuple(case[:count]), block.parents)
            accepted = accept(tree, case[count:])
            ends.append((accepted.nodes[-1] if accepted.nodes else ROOT, accepted.token_ids[-1]))
        node, token_id = torch.tensor(ends)[which].unbind(dim=-1)
        return node, token_id

    def _target_tokens(self, depth: int, paths: Tensor, rows: Tensor) -> Tensor:
        return self._perturbed(self._tables.target[depth][paths], depth, rows).argmax(dim=-1)

    def _perturbed(self, probs: Tensor, depth: int, rows: Tensor) -> Tensor:
        words = RANDOM_WORDS(self._seeds.rows(rows), len(PROMPT) + depth, np.arange(probs.shape[-1], dtype=np.int32))
        return probs / torch.from_numpy(EXPONENTIAL(words))


class _NoChances:
    """`invariant` has no uniforms."""

    def draft(self, base_length: int, rows: Tensor, levels: int, width: int) -> Tensor:
        raise RuntimeError("invariant draws no uniforms")

    def accept(self, base_length: int, rows: Tensor, candidates: int) -> Tensor:
        raise RuntimeError("invariant draws no uniforms")

    def residual(self, base_length: int, rows: Tensor) -> Tensor:
        raise RuntimeError("invariant draws no uniforms")


def path_numbers(token_ids: Tensor) -> Tensor:
    """int64 [rows, depth] -> [rows]."""
    number = torch.zeros(len(token_ids), dtype=torch.long)
    for column in token_ids.unbind(dim=-1):
        number = number * VOCABULARY_SIZE + column
    return number
