"""What every drafter keeps: what it proposes follows from the log alone, whatever happened to the log before."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specdec.digest import root_digest
from specdec.drafter import Drafter, DraftJob
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.log import Log
from specdec.params import StopConditions
from tools.cases import SAMPLED
from tools.continuations import LawContinuation
from tools.scripted import RandomTree, ScriptedDrafter
from tools.table_drafter import AgreeingLaw, TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(vocabulary_size=16, order=1000)
"""Few words, so that texts repeat themselves and a lookup finds something."""
CONTEXT = 120


def kv_model() -> TableModel:
    return TableModel(AgreeingLaw(LAW, 0.5), context_length=CONTEXT)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(kv_model()),
    "model in small chunks": lambda: ModelDrafter(kv_model(), prefill_chunk=3),
    "ngram": lambda: NgramDrafter(1, 3),
    "table": lambda: TableDrafter(LAW, 0.5),
    "scripted": lambda: ScriptedDrafter(RandomTree(3, 16), LawContinuation(LAW)),
}


@pytest.fixture(params=list(DRAFTERS.values()), ids=list(DRAFTERS))
def make_drafter(request: pytest.FixtureRequest) -> Callable[[], Drafter]:
    maker: Callable[[], Drafter] = request.param
    return maker


def new_log(token_ids: list[int]) -> Log:
    return Log(root_digest(b"", "test"), token_ids)


def job(log: Log, sequence_id: str = "s", length: int = 5, width: int = 2) -> DraftJob:
    return DraftJob(sequence_id, log, SAMPLED, StopConditions(1, CONTEXT), length, width)


def change(log: Log, proposed: tuple[int, ...], rng: random.Random) -> None:
    """What may happen to a log between two drafts: candidates accepted, some rejected, plain tokens, a roll back."""
    if rng.random() < 0.2:
        log.roll_back(rng.randint(1, len(log)))
    accepted = rng.randint(0, len(proposed))
    log.append(proposed[:accepted])
    log.append([rng.randrange(16) for _ in range(rng.choice([0, 1, 1, 1, 4, 9]))])


@pytest.mark.parametrize("seed", range(4))
def test_proposals_are_those_of_a_fresh_drafter(make_drafter: Callable[[], Drafter], seed: int) -> None:
    rng = random.Random(seed)
    drafter = make_drafter()
    logs = {name: new_log([rng.randrange(16) for _ in range(rng.randint(1, 9))]) for name in "abc"}
    for _ in range(12):
        chosen = rng.sample(sorted(logs), rng.randint(1, 3))
        jobs = [job(logs[name], name, rng.randint(1, 6), rng.randint(1, 3)) for name in chosen]
        proposed = drafter.draft(jobs)
        for task, tree in zip(jobs, proposed, strict=True):
            assert [tree] == make_drafter().draft([task])
            change(task.log, tree.token_ids[:3] if tree.is_chain else (), rng)


def test_proposals_keep_to_the_order(make_drafter: Callable[[], Drafter]) -> None:
    """At most the draft length on a path, and a tree of real ids."""
    drafter = make_drafter()
    log = new_log([1, 2, 1, 2, 1, 2])
    for length in (1, 2, 7):
        (tree,) = drafter.draft([job(log, length=length)])
        tree.validate(16)
        assert len(tree) > 0
        if not isinstance(drafter, ScriptedDrafter):
            assert tree.draft_length <= length


def test_a_sequence_opened_anew_knows_nothing_of_its_former_life(make_drafter: Callable[[], Drafter]) -> None:
    drafter = make_drafter()
    drafter.draft([job(new_log([3, 1, 3, 1, 3, 1]))])
    anew = job(new_log([3, 1, 3, 2, 2, 2]))
    assert drafter.draft([anew]) == make_drafter().draft([anew])
    drafter.release("s")
    drafter.release("s")
    drafter.release("never seen")
    assert drafter.draft([anew]) == make_drafter().draft([anew])


def test_at_the_end_of_the_context_there_is_less_and_then_nothing_to_propose() -> None:
    drafter = ModelDrafter(kv_model())
    for length, most in ((CONTEXT - 2, 2), (CONTEXT - 1, 1), (CONTEXT, 0)):
        (tree,) = drafter.draft([job(new_log([1, 2] * (length // 2) + [3] * (length % 2)), f"s{length}")])
        assert tree.draft_length <= most


def test_a_model_drafter_that_lost_its_room_proposes_again_when_there_is_some() -> None:
    """Two sequences in a pool that holds one: nobody fails, and what is released can be used again."""
    model = TableModel(AgreeingLaw(LAW, 0.5), blocks_total=8, page=4)
    drafter = ModelDrafter(model)
    first, second = job(new_log([1] * 20), "a"), job(new_log([2] * 20), "b")
    assert len(drafter.draft([first])[0]) > 0
    drafter.draft([first, second])
    drafter.release("a")
    assert drafter.draft([second]) == ModelDrafter(kv_model()).draft([second])
    drafter.release("b")
    assert model.blocks_used == 0
