"""Tokens of many sequences drawn together, as on a device, are those that each draws alone; nothing waits meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specdec import noise
from specdec.candidates import EMPTY, CandidateTree
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.law import Law, Rows, draw_together
from specdec.log import Log
from specdec.messages import Committed, Epoch, Failure, Grant
from specdec.params import AcceptRule, SamplingParams, StopConditions
from specdec.sampling import NOTHING, draw_rows
from target_worker import step as step_module
from target_worker.batch import Work, make_work
from target_worker.sequence import TargetSequence
from tools.engine import draw_tokens, tiny_model
from tools.no_waiting import NoWaiting

VOCABULARY = 3000
FREE = StopConditions(prompt_length=4, max_length=2**31, min_length=8, stop_token_ids=frozenset({3}))
PATHS = [(), (5,), (5, 9)]
MORE = (
    SamplingParams(),
    SamplingParams(min_p=0.05),
    SamplingParams(typical_p=0.8),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.2),
)
GRID = [
    replace(more, temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in itertools.product((0.0, 0.7, 1.5), (0, 50), (0.2, 0.9, 1.0))
    for more in MORE
]


def logits_of(seed: int, rows: int = len(PATHS)) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def test_together_and_alone_draw_the_same() -> None:
    batch = [
        Rows(Law(replace(params, seed=seed), FREE, [1, 2, 3, 4, 5]), logits_of(seed), PATHS)
        for seed, params in enumerate(itertools.chain(GRID, GRID))
    ]
    alone = [rows.law.draw(rows.logits, rows.paths) for rows in batch]
    assert draw_together(batch) == alone
    assert len({tuple(tokens) for tokens in alone}) > len(GRID)  # neither all likeliest nor all alike


@pytest.mark.parametrize("params", GRID[:: len(GRID) // 12], ids=str)
def test_a_draw_on_the_device_waits_for_nothing(params: SamplingParams) -> None:
    with NoWaiting():  # type: ignore[no-untyped-call]
        draw_rows(logits_of(1), params, [(1, 5), (1, 6), (2, 5)])


def test_a_bad_row_is_told_and_its_neighbours_are_drawn() -> None:
    logits = logits_of(7)
    logits[1] = torch.nan
    bad = Rows(Law(SamplingParams(seed=1), FREE, [1]), logits, PATHS)
    nothing = Rows(Law(SamplingParams(seed=1), FREE, [1]), torch.full((1, VOCABULARY), -torch.inf), [()])
    good = Rows(Law(SamplingParams(seed=2), FREE, [1]), logits_of(8), PATHS)
    first, second, third = draw_together([bad, nothing, good])
    assert first[1] == NOTHING
    assert NOTHING not in (first[0], first[2])
    assert second == [NOTHING]
    assert third == good.law.draw(good.logits, PATHS)


def test_noise_of_many_places_is_that_of_each() -> None:
    places = [(0, 0), (2**64 - 1, 7), (12345, 2**31 + 5)]
    rows = noise.exponential_rows(places, VOCABULARY, torch.device("cpu"))
    for row, (seed, position) in zip(rows, places, strict=True):
        assert torch.equal(row, noise.exponential(seed, position, torch.arange(VOCABULARY)))


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=4),
    SamplingParams(accept_rule=AcceptRule.REJECTION, seed=9),
]


class Spoilt(ModelRunner):
    """The second sequence's first row is bad."""

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        first, second, *others = super().forward(segments)
        return [first, torch.cat((torch.full_like(second[:1], torch.nan), second[1:])), *others]


def open_work(runner: ModelRunner, index: int, params: SamplingParams) -> Work:
    """The first step of a fresh sequence; three candidates where its rule needs no laws."""
    log = Log(f"{index}".encode(), draw_tokens(9 + index, seed=index))
    law = Law(params, StopConditions(len(log), 200), log.token_ids)
    sequence = TargetSequence(str(index), 1, Epoch(1, "o"), log, len(log), law, Grant(0), 0.0)
    ratio = params.accept_rule is not AcceptRule.INVARIANT
    sequence.pending = EMPTY if ratio else CandidateTree.chain(draw_tokens(3, seed=5))
    runner.open(sequence.sequence_id, log)
    work = make_work(sequence, 0, 64, 0.0)
    assert work is not None
    assert runner.reserve(sequence.sequence_id, len(work.segment.token_ids))
    return work


def test_a_step_commits_the_same_however_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sequence ends itself only, rules that test ratios keep their own way, and so does all if drawing together
    fails."""
    model = tiny_model("Llama")
    committed: list[list[object]] = []

    def fails(batch: Sequence[Rows]) -> list[list[int]]:
        raise RuntimeError("out of memory")

    for together in (False, True, True):
        if len(committed) == 2:
            monkeypatch.setattr(step_module, "draw_together", fails)
        monkeypatch.setattr(step_module, "draws_together", lambda logits, together=together: together)
        runner = Spoilt(model, name="tiny", vocabulary_size=160, context_length=256, kv_blocks=40)
        outcomes = step_module.step(runner, [open_work(runner, *pair) for pair in enumerate(PARAMS)])
        assert [outcome.failed for outcome in outcomes] == [False, True, False, False]
        assert isinstance(outcomes[1].result.body, Failure)
        bodies = [outcome.result.body for outcome in outcomes]
        committed.append([body.token_ids for body in bodies if isinstance(body, Committed)])
    assert committed[0] == committed[1] == committed[2]
