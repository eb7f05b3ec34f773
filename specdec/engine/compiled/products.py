"""Matrix products of bf16 rows with weights in tiles, for CPUs on which `pairs.runs_tiles`.

A weight [out, in] lies in *panels* of `TILE_WIDTH` outputs, in the order in which they are read: pair of inputs,
output, input of the pair. One output of one row is one sum over the pairs in order, in float32: the same bits in any
number of rows, and on any number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from specdec.engine.compiled.arena import Arena
from specdec.engine.compiled.compiling import compiled, inlined
from specdec.engine.compiled.kernels import Elements, Ints, narrowed, stored_bf16
from specdec.engine.compiled.product_vectors import (
    GROUP,
    GROUP_BYTES,
    TILE_ROUNDED_ROWS,
    TILE_ROWS,
    TILE_WIDTH,
    finish_sums,
    finish_wide_sums,
    multiply_rounded_tile,
    multiply_tile,
)
from specdec.engine.compiled.team import Crew, claim, meet
from specdec.engine.compiled.vectors import LANES

Floats = NDArray[np.float32]

PIECES = 8
"""Of a product for each thread, at least: then none of them waits long for the last one."""
SMALLEST_PART = 4
"""Tiles of rows for which it pays to read a panel once more."""


class Matrix(NamedTuple):
    """What rows are multiplied with."""

    panels: int  # address
    rounded: bool  # weights of 4 bits
    bias: Floats  # [panels * TILE_WIDTH]


class TileSpace(NamedTuple):
    """Of one thread, for the work in between."""

    sums: Floats  # [TILE_ROWS, TILE_WIDTH]
    wide: Floats  # [TILE_ROWS, inputs at most]


@inlined
def tile_space(inputs: int) -> TileSpace:
    return TileSpace(np.empty((TILE_ROWS, TILE_WIDTH), np.float32), np.empty((TILE_ROWS, inputs), np.float32))


def panels_of(outputs: int) -> int:
    return -(-outputs // TILE_WIDTH)


def in_panels(weight: torch.Tensor, arena: Arena) -> NDArray[np.uint16]:
    """weight [out, in], bf16 -> [panels, in / 2, TILE_WIDTH, 2], the last panel filled up with zeros. Raises
    ValueError for an odd number of inputs."""
    inputs = weight.shape[1]
    if inputs % 2:
        raise ValueError(f"a weight of {inputs} inputs has no pairs of them")
    panels = _filled(weight.detach()).view(-1, TILE_WIDTH, inputs // 2, 2).transpose(1, 2)
    return arena.place(panels.contiguous().view(torch.uint16).numpy())


def in_rounded_panels(
    levels: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor, arena: Arena
) -> NDArray[np.uint16]:
    """Weights `levels * scale + lowest`, the levels of 4 bits, int [out, in]; scales and lowest: [out, in / GROUP]. As
    [panels, in / GROUP, GROUP_BYTES / 2]: a word holds the levels of four outputs, `LANES` apart, at one input.

    Raises ValueError unless groups divide the inputs."""
    inputs = levels.shape[1]
    if inputs % GROUP:
        raise ValueError(f"a weight of {inputs} inputs has no groups of {GROUP}")
    groups, parts = inputs // GROUP, TILE_WIDTH // LANES
    lanes = _filled(levels).view(-1, parts, LANES, groups, GROUP // 2, 2).permute(0, 3, 4, 1, 2, 5)
    shifts = torch.arange(0, 4 * parts, 4, dtype=levels.dtype)[:, None, None]
    words = (lanes << shifts).sum(3).to(torch.uint16).flatten(2)  # [panels, groups, GROUP / 2 * 2 * LANES]
    others = [_filled(part).view(-1, TILE_WIDTH, groups).transpose(1, 2) for part in (scales, lowest)]
    bits = [part.bfloat16().contiguous().view(torch.uint16) for part in others]
    return arena.place(np.concatenate([part.numpy() for part in (words, *bits)], axis=-1))


def _filled(weight: torch.Tensor) -> torch.Tensor:
    """With zeros up to whole panels."""
    return functional.pad(weight, (0, 0, 0, -len(weight) % TILE_WIDTH))


@inlined
def _multiply_panel(
    rows: Elements,  # [rows, in], bf16, contiguous
    matrix: Matrix,
    space: TileSpace,
    outputs: Elements,  # [rows, out], bf16, or float32 for the same values
    panel: int,
    begin: int,
    end: int,
) -> None:
    """The outputs of one panel for the rows from `begin` to `end`."""
    inputs = rows.shape[1]
    first = panel * TILE_WIDTH
    width = min(TILE_WIDTH, outputs.shape[1] - first)
    most = TILE_ROUNDED_ROWS if matrix.rounded else TILE_ROWS
    for start in range(begin, end, most):
        tile = min(most, end - start)
        source = rows.ctypes.data + start * inputs * 2
        work = (space.wide.ctypes.data, space.wide.shape[1] * 4, space.sums.ctypes.data)
        if matrix.rounded:
            groups = inputs // GROUP
            columns = matrix.panels + panel * groups * GROUP_BYTES
            multiply_rounded_tile(tile, (columns, source, inputs * 2, groups, *work))
        else:
            columns = matrix.panels + first * inputs * 2
            multiply_tile(tile, (columns, source, inputs * 2, inputs // 2, *work))
        for row in range(tile):
            _finish_row(
                space.sums[row], matrix.bias[first : first + TILE_WIDTH], outputs[start + row, first : first + width]
            )


@inlined
def _finish_row(sums: Floats, bias: Floats, outputs: Elements) -> None:
    """Adds the bias, rounds to bf16. outputs: [TILE_WIDTH], or fewer of the last panel."""
    registers = len(outputs) // LANES
    arguments = (sums.ctypes.data, bias.ctypes.data, outputs.ctypes.data)
    if outputs.itemsize == 2:
        finish_sums(registers, arguments)
    else:
        finish_wide_sums(registers, arguments)
    for i in range(registers * LANES, len(outputs)):
        outputs[i] = stored_bf16(narrowed(sums[i] + bias[i], np.uint16(0)), outputs[i])


@compiled
def multiply_rows(rows: Elements, matrix: Matrix, space: TileSpace, outputs: Elements, crew: Crew) -> None:
    """The pieces that this thread claims (see `multiply`): panels, or parts of the rows of one if there are few panels.
    A function of its own: it has no sums that could be reordered."""
    tiles = -(-len(rows) // TILE_ROWS)
    panels = -(-outputs.shape[1] // TILE_WIDTH)
    parts = max(1, min(tiles // SMALLEST_PART, -(-PIECES * crew.threads // panels)))
    piece = claim(crew)
    while piece < panels * parts:
        panel, part = piece // parts, piece % parts
        begin, end = part * tiles // parts * TILE_ROWS, (part + 1) * tiles // parts * TILE_ROWS
        _multiply_panel(rows, matrix, space, outputs, panel, begin, min(end, len(rows)))
        piece = claim(crew)
    meet(crew)


@compiled
def multiply(rows: Elements, matrix: Matrix, outputs: Elements, counters: Ints, threads: int) -> None:
    """rows [rows, in] times the matrix, to outputs [rows, out]: one thread's part."""
    crew = Crew(counters, np.ones(1, np.int64), threads)
    multiply_rows(rows, matrix, tile_space(rows.shape[1]), outputs, crew)
