"""The shared noise is the same bits everywhere, and it is noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.noise import exponential, exponential_of, random_bits, random_words

# (seed, position, token id) -> r. Committed: a change of any bit changes what every seed means.
VECTORS = {
    (0, 0, 0): 3543252776,
    (0, 0, 1): 2597581238,
    (0, 0, 2): 942437965,
    (0, 0, 3): 2622040547,
    (1, 2, 0): 513510692,
    (1, 2, 1): 3542003380,
    (1, 2, 2): 4166806238,
    (1, 2, 3): 3845385114,
}


@pytest.mark.parametrize(("key", "bits"), VECTORS.items())
def test_bits_are_the_committed_vectors(key: tuple[int, int, int], bits: int) -> None:
    seed, position, token_id = key
    assert random_bits(seed, position, torch.tensor([token_id])).tolist() == [bits]


def test_bits_do_not_depend_on_vocabulary_padding_dtype_or_order() -> None:
    short = random_bits(7, 100, torch.arange(1000))
    long = random_bits(7, 100, torch.arange(151_936))
    assert torch.equal(short, long[:1000])
    assert torch.equal(short.flip(0), random_bits(7, 100, torch.arange(1000, dtype=torch.int32).flip(0)))


def test_largest_seed_and_position_are_in_range() -> None:
    bits = random_bits(2**64 - 1, 2**31, torch.arange(10_000))
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32


def test_exponential_is_the_rounded_float64_value_over_a_whole_vocabulary() -> None:
    ids = torch.arange(151_936)
    bits = random_bits(11, 5, ids).numpy().astype(np.float64)
    expected = (-np.log1p(-(bits + 0.5) * 2.0**-32)).astype(np.float32)
    actual = exponential(11, 5, ids).numpy()
    assert np.array_equal(actual, expected)
    words = random_words(11, 5, np.arange(151_936, dtype=np.int32))
    assert np.array_equal(words, bits)
    assert np.array_equal(exponential_of(words), actual)
    assert actual.min() > 0.0
    assert math.isfinite(float(actual.max()))


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_is_exponential_along_every_axis(axis: str) -> None:
    count = 5_000
    if axis == "token":
        values = exponential(3, 4, torch.arange(count))
    elif axis == "position":
        values = torch.cat([exponential(3, i, torch.tensor([9])) for i in range(count)])
    else:
        values = torch.cat([exponential(i, 4, torch.tensor([9])) for i in range(count)])
    assert stats.kstest(values.numpy(), "expon").pvalue > 1e-3


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    ids = torch.arange(50_000)
    base = exponential(3, 4, ids).numpy()
    for other in (exponential(3, 5, ids), exponential(4, 4, ids), exponential(4, 3, ids)):
        assert abs(stats.spearmanr(base, other.numpy()).statistic) < 0.02
