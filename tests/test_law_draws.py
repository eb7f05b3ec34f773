"""100 000 answers per cell follow the target's law: tokens, pairs within a round and pairs across rounds.

The draws go through the functions that the workers call, many at a time. That they are the workers' own answers is
shown for some seeds token by token.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch

from specdec.candidates import EMPTY, CandidateTree
from specdec.digest import root_digest
from specdec.drafter import Drafter, DraftJob
from specdec.drafters.model import ModelDrafter
from specdec.law import Law
from specdec.log import Log
from specdec.params import NO_REPORT, AcceptRule
from target_worker.decide import decide
from tools.law_cells import ANSWER_LENGTH, CELLS, DRAFT, PROMPT, STOP, TARGET, LawCell
from tools.law_chances import ManyChances, SeededChances
from tools.law_draws import Answers, Draws, InvariantDraws
from tools.law_statistics import Fit, require
from tools.law_tables import TrueLaw, rows_of
from tools.table_drafter import TableDrafter
from tools.table_model import TableModel

DRAWS = 100_000
COMPARISONS = 3 * len(CELLS)


def answers_of(cell: LawCell, count: int, seed: int) -> Answers:
    if cell.sampling.accept_rule is AcceptRule.INVARIANT:
        generator = torch.Generator().manual_seed(seed)
        return InvariantDraws(cell, torch.randint(2**62, (count,), generator=generator).tolist()).run()
    return Draws(cell, count, ManyChances(seed)).run()


def check_cell(shape: str, parameters: str, count: int = DRAWS) -> None:
    """Raises LawViolation."""
    cell = LawCell.of(shape, parameters)
    answers = answers_of(cell, count, zlib.crc32(f"{shape} {parameters}".encode()))
    tokens, law = answers.token_ids.numpy(), TrueLaw(cell)
    size = law.first.numel()
    first = torch.bincount(answers.token_ids[:, 0], minlength=size)
    require("token 1", Fit.of(first.numpy(), law.first.numpy()), COMPARISONS)
    for name, column, expected in (("tokens 1 and 2", 0, law.pairs), ("tokens 2 and 3", 1, law.later_pairs)):
        numbers = torch.tensor(tokens[:, column] * size + tokens[:, column + 1])
        pairs = torch.bincount(numbers, minlength=size * size).view(size, size)
        require(name, Fit.of(pairs.numpy(), expected.numpy()), COMPARISONS)
    rate = float(answers.accepted.sum()) / count / (ANSWER_LENGTH - 1)
    assert 0.1 < rate < 0.99, f"{rate:.2f} accepted: the cell tries one side only"


@pytest.mark.parametrize(("shape", "parameters"), CELLS)
def test_draws_follow_the_law(shape: str, parameters: str) -> None:
    check_cell(shape, parameters)


@pytest.mark.parametrize(("shape", "parameters"), CELLS)
def test_they_are_the_workers_own_answers(shape: str, parameters: str) -> None:
    cell = LawCell.of(shape, parameters)
    seeds = [1000 + 7 * i for i in range(40)]
    if cell.sampling.accept_rule is AcceptRule.INVARIANT:
        many = InvariantDraws(cell, seeds).run()
    else:
        many = Draws(cell, len(seeds), SeededChances(seeds)).run()
    assert many.token_ids.tolist() == [one_by_one(cell, seed) for seed in seeds]


def one_by_one(cell: LawCell, seed: int) -> list[int]:
    """One request: the real drafter drafts a block, the target's `decide` judges it, until the answer is complete."""
    sampling = replace(cell.sampling, seed=seed)
    drafter: Drafter = ModelDrafter(TableModel(DRAFT)) if cell.width == 1 else near_drafter()
    log = Log(root_digest(b"", "m"), PROMPT)
    law = Law(sampling, STOP, log.token_ids)
    while len(log) < STOP.max_length:
        room = STOP.max_length - len(log) - 1
        job = DraftJob("s", log, sampling, STOP, room, cell.width)
        tree = drafter.draft([job])[0] if room else EMPTY
        log.append(decide(law, tree, logits_behind(log, tree), len(log), 512, NO_REPORT).committed.token_ids)
    return log.since(len(PROMPT))


def near_drafter() -> TableDrafter:
    drafter = TableDrafter(TARGET)
    drafter._law = DRAFT  # type: ignore[assignment]
    return drafter


def logits_behind(log: Log, tree: CandidateTree) -> torch.Tensor:
    answer = log.since(len(PROMPT))
    paths = [[*answer, *(tree.token_ids[i] for i in tree.path(node))] for node in range(-1, len(tree))]
    return rows_of(TARGET, paths)
