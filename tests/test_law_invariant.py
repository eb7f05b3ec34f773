"""`invariant`: every tree gives the argmax of every plain step, and the noise behind it is noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec.candidates import EMPTY, CandidateTree
from specdec.noise import Domain, exponential, random_bits, uniforms
from specdec.params import NO_REPORT, SamplingParams, StopConditions
from specdec.sampling import process_logits
from specdec.support import Support
from target_worker.decide import decide
from tools.law_seams import TARGET_LAW
from tools.law_statistics import ALPHA
from tools.table_law import TableLaw

LAW = TableLaw(24, order=3, sharpness=4.0)
STOP = StopConditions(4, 200)
PROMPT = (1, 2, 3, 4)


def argmax_of(log: Sequence[int], sampling: SamplingParams) -> int:
    """argmax(log p + g) in numpy, from the bits of the noise alone."""
    probs = process_logits(torch.tensor(LAW.logits(log))[None], sampling)[0].double().numpy()
    bits = random_bits(sampling.seed, len(log), torch.arange(len(probs))).numpy()
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probs) - np.log(-np.log1p(-(bits + 0.5) / 2.0**32))))


def plain(sampling: SamplingParams, count: int) -> list[int]:
    log = list(PROMPT)
    for _ in range(count):
        log.append(argmax_of(log, sampling))
    return log[len(PROMPT) :]


def random_tree(rng: random.Random, right: Sequence[int]) -> CandidateTree:
    """Up to 12 nodes in any shape; along one path as many right tokens as chance has it, twins included."""
    count = rng.randint(1, 12)
    parents = [rng.randint(-1, i - 1) for i in range(count)]
    depths = CandidateTree((0,) * count, tuple(parents)).depths
    token_ids = [
        right[depth] if depth < len(right) and rng.random() < 0.6 else rng.randrange(LAW.vocabulary_size)
        for depth in depths
    ]
    return CandidateTree(tuple(token_ids), tuple(parents))


def logits_behind(log: Sequence[int], tree: CandidateTree) -> torch.Tensor:
    paths = [[tree.token_ids[i] for i in tree.path(node)] for node in range(-1, len(tree))]
    return torch.stack([torch.tensor(LAW.logits([*log, *path])) for path in paths])


def test_any_tree_gives_the_argmax_of_every_plain_step() -> None:
    rng = random.Random(3)
    accepted = 0
    for seed in range(120):
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        expected = plain(sampling, 20)
        for with_drafts in (True, False):
            log = list(PROMPT)
            law = TARGET_LAW(sampling, STOP, log)
            while len(log) < len(PROMPT) + 12:
                tree = random_tree(rng, expected[len(log) - len(PROMPT) :]) if with_drafts else EMPTY
                decision = decide(law, tree, logits_behind(log, tree), len(log), 512, NO_REPORT)
                log += decision.committed.token_ids
                accepted += len(decision.nodes)
            answer = log[len(PROMPT) :][:20]
            assert answer == expected[: len(answer)], f"seed {seed}: {answer} is not {expected[: len(answer)]}"
    assert accepted > 500


def even(cells: Tensor, kinds: int) -> float:
    """p-value of `kinds` equally likely cells."""
    return float(stats.chisquare(np.bincount(cells.ravel().numpy(), minlength=kinds)).pvalue)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_bits_are_even_and_neighbours_independent(axis: str) -> None:
    """Chi-square of 256 buckets of the highest and of the lowest bits, and of 16 x 16 buckets of neighbours along the
    axis: [2000 along the axis, 30]."""
    steps, token_ids = 2000, torch.arange(11, 41)
    if axis == "token":
        bits = random_bits(5, 9, torch.arange(30 * steps)).view(30, steps).T
    elif axis == "position":
        bits = torch.stack([random_bits(5, i, token_ids) for i in range(steps)])
    else:
        bits = torch.stack([random_bits(i, 9, token_ids) for i in range(steps)])
    for cells in (bits >> 24, bits & 0xFF):
        assert even(cells, 256) > ALPHA
        assert even((cells[::2] >> 4) * 16 + (cells[1::2] >> 4), 256) > ALPHA
        assert even((cells[::2] & 15) * 16 + (cells[1::2] & 15), 256) > ALPHA


@pytest.mark.parametrize("axis", ["seed", "base", "index", "domain"])
def test_uniforms_are_even_and_neighbours_independent(axis: str) -> None:
    """[2000 along the axis, 10]."""
    steps, count = 2000, 10
    domains = list(Domain)
    if axis == "index":
        drawn = uniforms(3, Domain.ACCEPT, 8, steps * count).view(count, steps).T
    elif axis == "base":
        drawn = torch.stack([uniforms(3, Domain.RESIDUAL, i, count) for i in range(steps)])
    elif axis == "seed":
        drawn = torch.stack([uniforms(i, Domain.DRAFT, 8, count) for i in range(steps)])
    else:
        drawn = torch.stack([uniforms(i // 2, domains[1 + i % 2], 8, count) for i in range(steps)])
    cells = (drawn * 16).long()
    assert stats.kstest(drawn.ravel().numpy(), "uniform").pvalue > ALPHA
    assert even(cells[::2] * 16 + cells[1::2], 256) > ALPHA


def test_tail_tokens_are_drawn_at_their_rate() -> None:
    """131 071 tokens of 1e-6 each beside one that has the rest: their total is 0.13107 a draw."""
    tail, each, draws = 2**17 - 1, 1e-6, 1000
    probs = np.full(tail + 1, each, np.float32)
    probs[0] = 1 - tail * each
    support = Support(np.arange(tail + 1, dtype=np.int32), probs)
    drawn = torch.tensor([support.likeliest(seed, 40, 1)[0][0] for seed in range(draws)])
    count = int((drawn > 0).sum())
    assert stats.binomtest(count, draws, tail * each).pvalue > ALPHA, f"{count} of {draws * tail * each:.0f}"
    quarters = np.bincount((drawn[drawn > 0] * 4 // (tail + 1)).numpy(), minlength=4)
    assert stats.chisquare(quarters).pvalue > ALPHA


def test_the_noise_resolves_a_millionth() -> None:
    """How often e < x for small x, over 2^25 ids: a coarser uniform would have steps here."""
    total, below = 0, {1e-6: 0, 1e-5: 0}
    for seed in range(8):
        noise = exponential(seed, 3, torch.arange(2**22))
        total += len(noise)
        for x in below:
            below[x] += int((noise < x).sum())
    for x, count in below.items():
        assert stats.poisson.cdf(count, total * x) > ALPHA / 2
        assert stats.poisson.sf(count - 1, total * x) > ALPHA / 2
