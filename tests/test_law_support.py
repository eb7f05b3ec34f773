"""Shortlists leave what the rule over the whole vocabulary leaves, and the draw among few is the draw among all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.law import Law
from specdec.params import SamplingParams, StopConditions
from specdec.sampling import dense_law, perturbed, process_logits, supports

VOCABULARY = 12_000
FREE = StopConditions(prompt_length=0, max_length=2**31)


def _random(seed: int) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def _masked(row: Tensor, allowed: int) -> Tensor:
    kept = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:allowed]
    return torch.full_like(row, -torch.inf).index_copy(0, kept, row[kept])


ROWS = {
    "like a model's": 4 * _random(1),
    "wide": _random(2),
    "nearly flat": 0.01 * _random(3),
    "flat": torch.zeros(VOCABULARY),
    "one stands out": torch.zeros(VOCABULARY).index_fill(0, torch.tensor([77]), 30.0),
    "ties": (3 * _random(4)).round(),
    "two values": (_random(5) > 1.0).float(),
    "masked": _masked(4 * _random(6), 30),
    "one left": _masked(_random(7), 1),
    "few tied, others far": _masked(torch.zeros(VOCABULARY), 10).clamp(min=-80.0),
    "at the edge of float32": torch.linspace(0.0, -105.0, VOCABULARY),
}
LOGITS = torch.stack(list(ROWS.values()))
GRID = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.02, 0.8, 100.0), (0, 1, 50, 9000), (1e-6, 0.9, 0.9999, 1.0), (0.0, 0.1)
    )
]


def whole(params: SamplingParams, logits: Tensor = LOGITS) -> Tensor:
    return dense_law((logits - logits.max(dim=-1, keepdim=True).values) / params.temperature, params)


@pytest.mark.parametrize("temperature", [0.02, 0.8, 100.0])
def test_the_same_tokens_are_left_with_the_same_probabilities(temperature: float) -> None:
    for params in (params for params in GRID if params.temperature == temperature):
        for name, ours, wanted in zip(ROWS, process_logits(LOGITS, params), whole(params), strict=True):
            assert torch.equal(ours > 0, wanted > 0), f"{name}, {params}"
            # Where registers are narrow torch sums 12,000 equals to within 2e-5.
            assert torch.allclose(ours, wanted, rtol=5e-5, atol=0.0), f"{name}, {params}"


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_a_nucleus_is_exact_in_many_rows(top_p: float) -> None:
    """Under which of the shortlists it ends differs from row to row."""
    scale = torch.linspace(0.5, 6.0, 60)[:, None]
    logits = scale * torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(11))
    params = SamplingParams(temperature=0.8, top_p=top_p)
    kept = [support.token_ids.tolist() for support in supports(logits, params)]
    assert kept == [row.nonzero().flatten().tolist() for row in whole(params, logits) > 0]


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.02, 0.8, 100.0])
def test_the_likeliest_are_those_among_all(temperature: float, top_p: float) -> None:
    for seed in range(4):
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        law = Law(params, FREE, [0] * 7)
        paths = [[0] * i for i in range(len(LOGITS))]
        found = law.likeliest(LOGITS, paths, 3)
        assert law.draw(LOGITS, paths) == [best[0][0] for best in found]
        for i, (name, probs) in enumerate(zip(ROWS, whole(params), strict=True)):
            scores = perturbed(probs, seed, 7 + i)
            order = torch.sort(scores, descending=True, stable=True).indices[:3].tolist()
            assert [token_id for token_id, _ in found[i]] == [j for j in order if scores[j] > 0], name
            told = torch.tensor([score for _, score in found[i]])
            assert torch.allclose(told, torch.log(scores[order[: len(told)]]), rtol=0.0, atol=1e-4), name


def test_rows_are_left_as_they_were() -> None:
    before = LOGITS.clone()
    for temperature in (0.0, 1.0):
        Law(SamplingParams(temperature=temperature), FREE, []).likeliest(LOGITS, [()] * len(LOGITS), 4)
    assert np.array_equal(LOGITS.numpy(), before.numpy())
