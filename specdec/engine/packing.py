"""How many rows a forward computes for those it is asked for, and how many positions attention computes together.

Kernels choose their order of summation by shape, so rows are padded to counts, and positions to tiles, between which no
bit of a row changes. Padding is not free: on a CPU a verify of 6 rows takes 0.82 of the time of one of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_ROWS = 4
"""As fast as one row or two; with fewer, kernels of another kind are chosen."""
TILE = 8
"""Positions, aligned to the absolute position, whose attention is computed together."""


@dataclass(frozen=True, slots=True)
class Packing:
    """few_tile: positions of a tile where no sequence has many rows. exact: no row's bits depend on what it is packed
    with, as a target needs. A drafter may be packed loosely, and then nothing is padded that would only cost."""

    least_rows: int
    row_multiple: int
    few_tile: int = TILE
    exact: bool = True

    def rows(self, count: int) -> int:
        """Rows that are computed for `count`."""
        return max(self.least_rows, -(-count // self.row_multiple) * self.row_multiple)


PADDED = Packing(LEAST_ROWS, row_multiple=4)
"""Exact wherever a CPU was tried."""
SINGLE = Packing(LEAST_ROWS, row_multiple=1)
"""Exact in some arithmetic (oneDNN's in bf16, 8-bit integers) and not in all (MKL's in fp32 on two threads)."""
ALONE = Packing(1, row_multiple=1)
"""Exact where products are our own."""
LOOSE = Packing(1, row_multiple=1, few_tile=1, exact=False)
