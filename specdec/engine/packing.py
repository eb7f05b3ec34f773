"""How many rows a forward computes for those it is asked for.

Kernels choose their order of summation by the number of rows, so rows are padded to counts between which no bit of a
row changes. Padding is not free: on a CPU a verify of 6 rows takes 0.82 of the time of one of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_ROWS = 4
"""As fast as one row or two; with fewer, kernels of another kind are chosen."""


@dataclass(frozen=True, slots=True)
class Packing:
    """exact: no row's bits depend on what it is packed with, as a target needs. A drafter may be packed loosely, and
    then nothing is padded that would only cost."""

    least_rows: int
    row_multiple: int
    exact: bool = True

    def rows(self, count: int) -> int:
        """Rows that are computed for `count`."""
        return max(self.least_rows, -(-count // self.row_multiple) * self.row_multiple)


PADDED = Packing(LEAST_ROWS, row_multiple=4)
"""Exact wherever a CPU was tried."""
SINGLE = Packing(LEAST_ROWS, row_multiple=1)
"""Exact in some arithmetic (oneDNN's in bf16, 8-bit integers) and not in all (MKL's in fp32 on two threads)."""
LOOSE = Packing(1, row_multiple=1, exact=False)
