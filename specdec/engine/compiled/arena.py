"""Memory for weights, in blocks so large that Linux backs them with huge pages.

A forward reads every weight once and in order. In pages of 4 KiB, the look-up of addresses is a good part of that, and
the CPU fetches ahead only within a page; a weight that is smaller than a huge page never gets one of its own.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 64 * 2**20
"""Of a block, unless a single array needs more. Numpy asks for huge pages for all that is this large."""
ALIGNMENT = 64
"""Bytes of a cache line."""

Array = TypeVar("Array", bound=NDArray[Any])


class Arena:
    """Places arrays one behind the other. A block lives as long as any array in it."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def place(self, array: Array) -> Array:
        """A contiguous copy that begins with a cache line."""
        room = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if len(self._free) < room:
            block = np.empty(max(BLOCK_BYTES, room + ALIGNMENT), np.uint8)
            self._free = block[-block.ctypes.data % ALIGNMENT :]
        placed: Array = self._free[: array.nbytes].view(array.dtype).reshape(array.shape)  # type: ignore[assignment]
        self._free = self._free[room:]
        placed[...] = array
        return placed
