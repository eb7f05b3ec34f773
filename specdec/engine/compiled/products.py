"""Matrix products of bf16 rows with weights in tiles, for CPUs that sum products of bf16 pairs themselves.

A weight [out, in] lies in *panels* of `TILE_WIDTH` outputs, in the order in which they are read: pair of inputs,
output, input of the pair. One output of one row is one sum over the pairs in order, in float32: the same bits in any
number of rows, and on any number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specdec.engine.compiled.compiling import compiled, inlined
from specdec.engine.compiled.kernels import Elements, Ints, narrowed, stored_bf16
from specdec.engine.compiled.team import Crew, claim, meet
from specdec.engine.compiled.vectors import LANES, TILE_ROWS, TILE_WIDTH, multiply_tile

Floats = NDArray[np.float32]


def panels_of(outputs: int) -> int:
    return -(-outputs // TILE_WIDTH)


def in_panels(weight: torch.Tensor) -> NDArray[np.uint16]:
    """weight [out, in], bf16 -> [panels, in / 2, TILE_WIDTH, 2], the last panel filled up with zeros, aligned to a
    cache line. Raises ValueError for an odd number of inputs."""
    outputs, inputs = weight.shape
    if inputs % 2:
        raise ValueError(f"a weight of {inputs} inputs has no pairs of them")
    panels = panels_of(outputs)
    filled = functional.pad(weight.detach(), (0, 0, 0, panels * TILE_WIDTH - outputs))
    ordered = filled.view(panels, TILE_WIDTH, inputs // 2, 2).transpose(1, 2).reshape(-1).view(torch.uint16).numpy()
    room = np.empty(len(ordered) + 2 * LANES, np.uint16)
    start = -room.ctypes.data % 64 // 2
    room[start : start + len(ordered)] = ordered
    return room[start : start + len(ordered)].reshape(panels, inputs // 2, TILE_WIDTH, 2)


@inlined
def _multiply_panel(
    rows: Elements,  # [rows, in], bf16, contiguous
    weights: int,  # address of the panels
    bias: Floats,  # [panels * TILE_WIDTH]
    sums: Floats,  # [TILE_ROWS, TILE_WIDTH], for the work in between
    outputs: Elements,  # [rows, out], bf16, or float32 for the same values
    panel: int,
) -> None:
    """The outputs of one panel for all rows."""
    count, inputs = rows.shape
    pairs, row_bytes = inputs // 2, inputs * 2
    first = panel * TILE_WIDTH
    width = min(TILE_WIDTH, outputs.shape[1] - first)
    for start in range(0, count, TILE_ROWS):
        tile = min(TILE_ROWS, count - start)
        source, columns = rows.ctypes.data + start * row_bytes, weights + first * row_bytes
        multiply_tile(tile, (columns, source, row_bytes, pairs, sums.ctypes.data))
        for row in range(tile):
            for i in range(width):
                rounded = narrowed(sums[row, i] + bias[first + i], rows[0, 0])
                outputs[start + row, first + i] = stored_bf16(rounded, outputs[0, 0])


@compiled
def multiply_rows(rows: Elements, weights: int, bias: Floats, sums: Floats, outputs: Elements, crew: Crew) -> None:
    """The panels that this thread claims (see `multiply`). A function of its own: it has no sums that could be
    reordered."""
    panel = claim(crew)
    while panel * TILE_WIDTH < outputs.shape[1]:
        _multiply_panel(rows, weights, bias, sums, outputs, panel)
        panel = claim(crew)
    meet(crew)


@compiled
def multiply(rows: Elements, weights: int, bias: Floats, outputs: Elements, counters: Ints, threads: int) -> None:
    """rows [rows, in] times the weights at the address, to outputs [rows, out]: one thread's part."""
    crew = Crew(counters, np.ones(1, np.int64), threads)
    multiply_rows(rows, weights, bias, np.empty((TILE_ROWS, TILE_WIDTH), np.float32), outputs, crew)
