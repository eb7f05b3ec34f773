"""What the table model adds to the seam: its law, its faults, its own checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.drafter import DraftJob
from specdec.engine.model import Segment
from specdec.log import Log
from specdec.params import SamplingParams, StopConditions
from tools.continuations import KnownContinuation, LawContinuation, plain_output
from tools.scripted import RandomTree, WrongFrom, oracle
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, PlantedFault, TableModel

GREEDY = SamplingParams(temperature=0.0)


def job(token_ids: list[int], sampling: SamplingParams = GREEDY, length: int = 6, width: int = 1) -> DraftJob:
    return DraftJob("s", Log(b"root", token_ids), sampling, StopConditions(len(token_ids), 500), length, width)


def open_model(model: TableModel, token_ids: list[int]) -> Segment:
    model.open("s", Log(b"root", token_ids))
    assert model.reserve("s", len(token_ids))
    return Segment("s", tuple(token_ids))


def test_the_law_is_the_same_in_another_process() -> None:
    code = "from tools.table_law import TableLaw; print(TableLaw(vocabulary_size=9).logits([1, 2, 3]).tobytes().hex())"
    here = Path(__file__).parent
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=here.parent, env={"PYTHONPATH": f"{here}:{here.parent}"}, capture_output=True)
    assert out.stdout.decode().strip() == TableLaw(vocabulary_size=9).logits([1, 2, 3]).tobytes().hex()


def test_the_law_depends_on_the_last_tokens_alone() -> None:
    law = TableLaw(order=3)
    assert np.array_equal(law.logits([9, 1, 2, 3]), law.logits([4, 4, 1, 2, 3]))
    assert not np.array_equal(law.logits([1, 2, 3]), law.logits([2, 2, 3]))
    assert not np.array_equal(law.logits([1, 2, 3]), TableLaw(salt="other").logits([1, 2, 3]))


def test_padding_is_cut_and_changes_no_real_column() -> None:
    assert np.array_equal(TableLaw(60, padding=68).logits([1, 2, 3]), TableLaw(60).logits([1, 2, 3]))


def test_logits_come_from_the_kv_and_not_from_the_log() -> None:
    model = TableModel()
    log = Log(b"root", [1, 2, 3])
    model.open("s", log)
    model.reserve("s", 3)
    (logits,) = model.forward([Segment("s", (1, 2, 9))])
    assert np.array_equal(logits[0].numpy(), model.law.logits([1, 2, 9]))


@pytest.mark.parametrize("kind", [FaultKind.NAN, FaultKind.INFINITE])
def test_a_fault_spoils_the_marked_sequence_from_its_length_on(kind: FaultKind) -> None:
    model = TableModel(faults=[Fault(kind, marker=7, from_length=4)])
    (early,) = model.forward([open_model(model, [7, 1, 2])])
    assert torch.isfinite(early).all()
    model.release("s")
    (late,) = model.forward([open_model(model, [7, 1, 2, 3])])
    assert not torch.isfinite(late).any()
    model.release("s")
    (other,) = model.forward([open_model(model, [8, 1, 2, 3])])
    assert torch.isfinite(other).all()


def test_a_planted_exception_comes_out_of_forward_and_leaves_no_rows() -> None:
    model = TableModel(faults=[Fault(FaultKind.RAISE, marker=7)])
    segment = open_model(model, [7, 1])
    with pytest.raises(PlantedFault):
        model.forward([segment])
    assert model.kv_length("s") == 0


@pytest.mark.parametrize(
    "segment",
    [
        Segment("s", (64,)),
        Segment("s", (-1,)),
        Segment("s", (1, 2), parents=(-1, 1)),
        Segment("s", (1,), num_logits=2),
        Segment("s", tuple([1] * 200)),
    ],
    ids=["id beyond the vocabulary", "id -1", "no tree", "too many logits", "no room"],
)
def test_what_no_model_could_run_is_refused(segment: Segment) -> None:
    model = TableModel()
    open_model(model, [1, 2])
    with pytest.raises(ValueError, match=r"token id|tree|num_logits|reserved"):
        model.forward([segment])


@pytest.mark.parametrize("rows", [[1], [0, 2], [2, 0], [3]])
def test_keeping_what_is_no_path_is_refused(rows: list[int]) -> None:
    model = TableModel()
    open_model(model, [1])
    model.reserve("s", 3)
    model.forward([Segment("s", (1, 2, 3), parents=(-1, 0, 1))])
    with pytest.raises(ValueError, match="no path"):
        model.keep("s", rows)


def test_a_wrong_rollback_of_the_caller_changes_the_logits() -> None:
    model = TableModel()
    model.forward([open_model(model, [1, 2])])
    model.keep("s", [0, 1])
    model.reserve("s", 3)
    model.forward([Segment("s", (3, 4, 5))])
    model.keep("s", [0, 1])  # as if candidate 4 had been accepted
    model.reserve("s", 1)
    (logits,) = model.forward([Segment("s", (6,))])
    assert not np.array_equal(logits[0].numpy(), model.law.logits([1, 2, 3, 6]))
    assert np.array_equal(logits[0].numpy(), model.law.logits([3, 4, 6]))
    model.check_integrity()


def test_scripts_are_right_and_wrong_where_they_say() -> None:
    law = TableLaw()
    task = job([3, 1, 4], SamplingParams(temperature=0.9, seed=5))
    right = plain_output(law, [3, 1, 4], task.sampling, 6)
    known = KnownContinuation([([3, 1], [4, *right])])
    assert LawContinuation(law)(task) == known(task) == right
    assert list(oracle(task, right).token_ids) == right
    half = WrongFrom(2, law.vocabulary_size)(task, right)
    assert [a == b for a, b in zip(half.token_ids, right, strict=True)] == [True, True, False, True, True, True]


def test_random_trees_hold_the_right_path_on_any_branch() -> None:
    law = TableLaw()
    first = 0
    for start in range(40):
        task = job([start, 1, 4])
        right = plain_output(law, task.log.token_ids, GREEDY, 6)
        tree = RandomTree(4, law.vocabulary_size)(task, right)
        tree.validate(law.vocabulary_size)
        assert tree.walk(right) is not None
        assert tree.draft_length >= 6
        first += tree.token_ids[0] == right[0]
    assert 5 < first < 35


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_table_drafter_agrees_as_much_as_it_is_told(sampling: SamplingParams) -> None:
    law = TableLaw()

    def agreement(likeness: float, width: int = 1) -> float:
        drafter = TableDrafter(law, likeness)
        hits = 0
        for start in range(100):
            task = job([start % 64, start // 2, 7], sampling, length=1, width=width)
            (tree,) = drafter.draft([task])
            hits += plain_output(law, task.log.token_ids, sampling, 1)[0] in tree.token_ids
        return hits / 100

    assert agreement(1.0) == 1.0
    assert 0.5 < agreement(0.8) < 1.0
    assert agreement(0.0) < 0.5
    assert agreement(0.8) <= agreement(0.8, width=3)
