"""On a CPU without products of bf16 the loops of products and scores compute the same in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from llvmlite.binding import get_host_cpu_features

from specdec.engine.compiled import pairs
from specdec.engine.compiled.arena import Arena
from specdec.engine.compiled.attention_vectors import score_keys
from specdec.engine.compiled.product_vectors import (
    GROUP,
    TILE_ROUNDED_ROWS,
    TILE_ROWS,
    TILE_WIDTH,
    finish_sums,
    multiply_rounded_tile,
    multiply_tile,
)
from specdec.engine.compiled.products import in_panels, in_rounded_panels
from specdec.engine.compiled.tiled_layers import bits
from specdec.engine.compiled.vectors import LANES
from specdec.engine.int4_linear import levels_of
from tools.engine import drawn

FEATURES = {"narrow": {"avx2": True, "fma": True}, "wide": {"avx2": True, "fma": True, "avx512f": True}}
HERE = dict(get_host_cpu_features())
Kernel = Callable[..., Any]


@pytest.fixture(scope="module", params=list(FEATURES))
def registers(request: pytest.FixtureRequest) -> Iterator[str]:
    """As of a CPU with these features alone."""
    wanted = FEATURES[request.param]
    if not all(HERE.get(feature) for feature in wanted):
        pytest.skip("this CPU has no such registers")
    cached = (pairs.multiplies_bf16, pairs.runs_tiles, pairs.most_sums)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "_features", lambda: wanted)
        for function in cached:
            function.cache_clear()
        yield request.param
    for function in cached:
        function.cache_clear()


def kernel_of(instructions: Any, signature: str) -> Kernel:
    """Compiled anew, and kept nowhere."""
    if signature.startswith("void(int64,"):
        return numba.njit(signature)(lambda count, arguments: instructions(count, arguments))
    return numba.njit(signature)(lambda arguments: instructions(arguments))


def test_sums_are_those_of_float32_and_the_same_in_any_number_of_rows(registers: str) -> None:
    """With a number of inputs that is no multiple of what a register or a block holds. Other weights lie behind."""
    multiply, inputs = kernel_of(multiply_tile, "void(int64, UniTuple(int64, 7))"), 70
    rows, weight = drawn(TILE_ROWS, inputs), drawn(2 * TILE_WIDTH, inputs, seed=1)
    panels, source = in_panels(weight, Arena()), bits(rows)
    expected = (rows.double() @ weight[:TILE_WIDTH].double().T).numpy()
    last = None
    for count in range(TILE_ROWS, 0, -1):
        out = np.full((TILE_ROWS, TILE_WIDTH), np.nan, np.float32)
        wide = np.empty((TILE_ROWS, inputs), np.float32)
        multiply(
            count,
            (
                panels.ctypes.data,
                source.ctypes.data,
                inputs * 2,
                inputs // 2,
                wide.ctypes.data,
                inputs * 4,
                out.ctypes.data,
            ),
        )
        np.testing.assert_allclose(out[:count], expected[:count], rtol=1e-5, atol=1e-5)
        assert np.isnan(out[count:]).all()
        assert last is None or np.array_equal(out[:count], last[:count])
        last = out


def test_weights_of_4_bits_are_levels_scales_and_lowest_values(registers: str) -> None:
    multiply, inputs = kernel_of(multiply_rounded_tile, "void(int64, UniTuple(int64, 7))"), 3 * GROUP
    rows = drawn(TILE_ROUNDED_ROWS, inputs)
    weight = levels_of(drawn(TILE_WIDTH, inputs, seed=1), GROUP)
    panels, source = in_rounded_panels(weight.levels, weight.scales, weight.lowest, Arena()), bits(rows)
    scales, lowest = (part.bfloat16().double().repeat_interleave(GROUP, 1) for part in (weight.scales, weight.lowest))
    expected = (rows.double() @ (weight.levels * scales + lowest).T).numpy()
    for count in range(1, TILE_ROUNDED_ROWS + 1):
        out, wide = np.zeros((TILE_ROUNDED_ROWS, TILE_WIDTH), np.float32), np.empty((count, inputs), np.float32)
        multiply(
            count,
            (
                panels.ctypes.data,
                source.ctypes.data,
                inputs * 2,
                inputs // GROUP,
                wide.ctypes.data,
                inputs * 4,
                out.ctypes.data,
            ),
        )
        np.testing.assert_allclose(out[:count], expected[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 48, 16])
def test_scores_are_products_of_query_and_keys(registers: str, dim: int, score: Kernel) -> None:
    heads, count = 3, 37
    query, keys = drawn(heads, dim), drawn(2 * count, dim, seed=1)
    slots = np.random.default_rng(0).permutation(2 * count)[:count].astype(np.int64)
    room = -(-count // LANES) * LANES
    scores = np.zeros((heads, room), np.float32)
    asked, held = bits(query), bits(keys)
    score(
        (asked.ctypes.data, dim * 2, heads, dim, held.ctypes.data, held.ctypes.data, dim * 2, slots.ctypes.data, count,
         scores.ctypes.data, room * 4)
    )  # fmt: skip
    expected = (query.double() @ keys.double()[slots].T).numpy()
    np.testing.assert_allclose(scores[:, :count], expected, rtol=1e-5, atol=1e-5)
    assert np.isneginf(scores[:, count:]).all()


@pytest.fixture(scope="module")
def score(registers: str) -> Kernel:
    return kernel_of(score_keys, "void(UniTuple(int64, 11))")


def test_sums_are_rounded_as_torch_rounds_them(registers: str) -> None:
    """To the nearest even; what is too large or no number stays so."""
    finish, count = kernel_of(finish_sums, "void(int64, UniTuple(int64, 3))"), TILE_WIDTH // LANES
    ties = (torch.arange(TILE_WIDTH // 2, dtype=torch.int32) << 15) + 0x3F800000
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)  # no numbers, by low bits alone
    sums = torch.cat([ties.view(torch.float32), torch.randn(TILE_WIDTH // 2 - 8), odd])
    sums = torch.cat([sums, torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0])])
    out = torch.zeros(TILE_WIDTH, dtype=torch.bfloat16)
    values, target, bias = sums.numpy(), out.view(torch.uint16).numpy(), np.zeros(TILE_WIDTH, np.float32)
    finish(count, (values.ctypes.data, bias.ctypes.data, target.ctypes.data))
    assert torch.equal(out.nan_to_num(7.0), sums.bfloat16().nan_to_num(7.0))
    assert torch.equal(out.isnan(), sums.isnan())
