"""The processed law is transformers', and a draw follows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.law import Law
from specdec.params import SamplingParams, StopConditions
from specdec.sampling import DegenerateLogits, perturbed, process_logits

FREE = StopConditions(prompt_length=0, max_length=2**31)


def draw(logits: torch.Tensor, params: SamplingParams, positions: list[int], stop: StopConditions = FREE) -> list[int]:
    """Each row alone, at its position of a log of zeros."""
    return [
        token_id
        for row, position in zip(logits, positions, strict=True)
        for token_id in Law(params, stop, [0] * position).draw(row[None], [()])
    ]


GRID = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (0, 1, 7, 5000)
    for top_p in (0.1, 0.9, 1.0)
    for min_p in (0.0, 0.05, 0.5)
]


def _reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    no_ids = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    scores = processors(no_ids, logits)  # type: ignore[arg-type]
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize("vocabulary_size", [16, 3000])
@pytest.mark.parametrize("params", GRID, ids=str)
def test_law_is_that_of_transformers(params: SamplingParams, vocabulary_size: int) -> None:
    logits = torch.randn(5, vocabulary_size, generator=torch.Generator().manual_seed(1)) * 3
    difference = (process_logits(logits, params) - _reference(logits, params)).abs().max()
    assert difference < 1e-5


def test_top_p_of_a_flat_law_needs_more_than_the_shortlist() -> None:
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(2)) * 0.01
    params = SamplingParams(top_p=0.9)
    kept = process_logits(logits, params) > 0
    assert torch.equal(kept, _reference(logits, params) > 0)
    assert int(kept[0].sum()) > 15_000


def test_a_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert process_logits(logits, SamplingParams(temperature=1e-30)).tolist() == [[0.0, 1.0, 0.0]]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert draw(torch.tensor([[0.0, 5.0, 5.0, 1.0]]), SamplingParams(temperature=0.0), [3]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[float("nan"), 1.0], [-float("inf"), -float("inf")], [float("inf"), 1.0]])
def test_degenerate_logits_are_refused(row: list[float], temperature: float) -> None:
    with pytest.raises(DegenerateLogits):
        draw(torch.tensor([row]), SamplingParams(temperature=temperature), [0])


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_draws_follow_the_law(axis: str) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9)
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(3)) * 2
    probs = process_logits(logits, params)[0]
    count = 8_000
    keys = [(i, 7) if axis == "seed" else (7, i) for i in range(count)]
    drawn = np.bincount([int(perturbed(probs, seed, position).argmax()) for seed, position in keys], minlength=16)
    support = probs.numpy() > 0
    assert drawn[~support].sum() == 0
    expected = probs.numpy()[support].astype(np.float64)
    assert stats.chisquare(drawn[support], expected / expected.sum() * count).pvalue > 1e-3


def test_a_draw_does_not_depend_on_its_neighbours_rows() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(temperature=1.3, top_p=0.8, seed=9)
    together = Law(params, FREE, [0] * 10).draw(logits, [(), (1,), (1, 2), (1, 2, 3)])
    assert together == draw(logits, params, [10, 11, 12, 13])


def test_stop_tokens_are_not_drawn_before_the_least_length() -> None:
    stop = StopConditions(prompt_length=4, max_length=20, min_length=6, stop_token_ids=frozenset({2}))
    logits = torch.tensor([[0.0, 1.0, 9.0]]).repeat(4, 1)
    assert draw(logits, SamplingParams(temperature=0.0), [4, 5, 6, 7], stop) == [1, 1, 2, 2]


def test_logits_are_their_own_again_behind_a_draw_before_the_least_length() -> None:
    stop = StopConditions(prompt_length=4, max_length=20, min_length=6, stop_token_ids=frozenset({2}))
    with torch.inference_mode():  # as an engine's are, which nothing may write to elsewhere
        logits = torch.tensor([[0.0, 1.0, 9.0]]).repeat(2, 1)
    law = Law(SamplingParams(temperature=0.0), stop, [0] * 4)
    paths: list[tuple[int, ...]] = [(), (1,)]
    scores = law.scores(logits, paths)
    assert law.draw(logits, paths) == [1, 1]
    assert law.probs(logits, paths).argmax(dim=-1).tolist() == [1, 1]
    assert logits[:, 2].tolist() == [9.0, 9.0]
    assert scores[:, 2].tolist() == [-torch.inf, -torch.inf]
    with torch.inference_mode():
        logits[1, 1] = torch.nan
    with pytest.raises(DegenerateLogits):
        law.draw(logits, paths)
    assert logits[0, 2] == 9.0
