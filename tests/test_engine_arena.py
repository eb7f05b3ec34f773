"""Memory for weights: arrays in large blocks keep their values, and none lies in another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.engine.compiled.arena import ALIGNMENT, BLOCK_BYTES, Arena


def place(memory: Arena, sizes: list[int]) -> list[NDArray[np.uint16]]:
    """Arrays of so many elements, each full of its number."""
    return [memory.place(np.full((1, size), i, np.uint16)) for i, size in enumerate(sizes)]


def test_arrays_lie_beside_each_other_each_at_a_cache_line() -> None:
    placed = place(Arena(), [1, 31, 32, 33, 1000])
    assert [array.tolist() for array in placed] == [[[i] * array.size] for i, array in enumerate(placed)]
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in placed)
    assert placed[-1].ctypes.data - placed[0].ctypes.data == ALIGNMENT * (1 + 1 + 1 + 2)


def test_a_full_block_is_followed_by_another_and_an_array_may_be_larger_than_one() -> None:
    placed = place(Arena(), [BLOCK_BYTES // 4, BLOCK_BYTES // 4 - ALIGNMENT, BLOCK_BYTES, 5])
    assert all((array == i).all() for i, array in enumerate(placed))
    assert placed[0].base is placed[1].base
    assert len({id(array.base) for array in placed}) > 1
