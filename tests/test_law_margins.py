"""What numeric noise could have made of a draw: no honest difference is told a margin above the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.law import Law
from specdec.margins import filter_bounds, margins
from specdec.params import SamplingParams, StopConditions

VOCABULARY = 40
NOISE = 0.2
FILTERED = {
    "none": SamplingParams(1.0, seed=1),
    "greedy": SamplingParams(0.0, seed=1),
    "top-k": SamplingParams(1.0, top_k=7, seed=1),
    "top-p": SamplingParams(1.0, top_p=0.8, seed=1),
    "min-p": SamplingParams(1.0, min_p=0.1, seed=1),
    "all three": SamplingParams(0.7, top_k=12, top_p=0.9, min_p=0.05, seed=1),
    "typical": SamplingParams(1.0, typical_p=0.7, seed=1),
}
STOP = StopConditions(0, 1 << 20)


def moved(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """As noise moves them: no gap of two by more than `NOISE`. At its worst, so each by all or by nothing."""
    return logits + NOISE * (torch.rand(logits.shape, generator=generator) < 0.5) + 3.0


def rows(count: int, seed: int) -> torch.Tensor:
    return 2.0 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FILTERED)
def test_a_difference_that_noise_makes_has_no_larger_margin(name: str) -> None:
    """And most draws have a larger one, or a fault would not be seen (none of typical-p, whose edges are not known)."""
    params, generator = FILTERED[name], torch.Generator().manual_seed(7)
    scale = params.temperature or 1.0
    differences = 0
    logits = rows(150, seed=5)
    paths = [(0,) * i for i in range(len(logits))]  # a position of its own for each row
    law = Law(params, STOP, [])
    plain = law.draw(logits, paths)
    told = margins(law, logits, paths, plain, NOISE / scale)
    for _ in range(4):
        served = law.draw(moved(logits, generator), paths)
        for one, other, margin in zip(plain, served, told, strict=True):
            differences += one != other
            assert one == other or margin <= NOISE / scale + 1e-6
    above = sum(margin > NOISE / scale for margin in told)
    assert differences > 0
    assert above > (75 if name != "typical" else -1)


@pytest.mark.parametrize("name", sorted(FILTERED.keys() - {"none", "greedy", "typical"}))
def test_what_is_certain_stays_and_what_is_kept_was_possible(name: str) -> None:
    params, generator = FILTERED[name], torch.Generator().manual_seed(8)
    logits = rows(100, seed=6)
    law, paths = Law(params, STOP, []), [()] * 100
    certain, possible = filter_bounds(logits / params.temperature, params, NOISE / params.temperature)
    for _ in range(20):
        kept = law.probs(moved(logits, generator), paths) > 0
        assert not (certain & ~kept).any()
        assert not (kept & ~possible).any()
    assert (possible & ~certain).any(dim=-1).float().mean() > 0.1
    assert (possible & ~certain).sum() < 0.5 * possible.sum()


def test_without_noise_the_bounds_are_the_law() -> None:
    params = replace(FILTERED["all three"], temperature=1.0)
    logits = rows(100, seed=9)
    certain, possible = filter_bounds(logits, params, 0.0)
    kept = Law(params, STOP, []).probs(logits, [()] * 100) > 0
    assert torch.equal(certain, kept)
    assert torch.equal(possible, kept)
