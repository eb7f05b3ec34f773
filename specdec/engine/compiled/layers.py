"""All decoder layers and the output layer in one kernel: between the first row and the last logit nothing returns to
Python, and no thread falls asleep."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.compiled.compiling import compiled, inlined
from specdec.engine.compiled.kernels import (
    Elements,
    Ints,
    add_and_normalize_row,
    gate_row,
    normalize_row,
    store_row,
)
from specdec.engine.compiled.products import Floats, Matrix, TileSpace, multiply_rows, tile_space
from specdec.engine.compiled.team import Crew, claim, meet
from specdec.engine.compiled.tiled_attention import attend_heads, rotate
from specdec.engine.compiled.vectors import LANES

PHASES_PER_LAYER = 9
OTHER_PHASES = 3
FEW_ROWS = 4
"""Of a thread: then it claims single heads of them, else all heads of a row, whose keys lie beside each other."""


class Weights(NamedTuple):
    """bf16 as uint16. Biases are float32, [layers, panels * TILE_WIDTH], zero where there is none."""

    norms: NDArray[np.uint16]  # [2 * layers + 1, width]: of attention and MLP in turn, the final one last
    panels: Ints  # [layers, 4]: addresses of the weights that project, merge, expand, reduce
    rounded: bool  # weights of 4 bits
    project_biases: Floats
    merge_biases: Floats
    expand_biases: Floats
    reduce_biases: Floats
    output_panels: int  # address
    output_bias: Floats  # [panels * TILE_WIDTH]
    kv: NDArray[np.uint16]  # [layers, 2, slots, kv_heads, dim]
    scalings: Floats  # [layers]
    epsilon: float


class Batch(NamedTuple):
    """The rows of one forward."""

    cosine: Elements  # [rows, dim]
    sine: Elements
    write_slots: Ints  # [rows]
    key_slots: Ints  # [any]
    first_keys: Ints  # [rows]
    num_keys: Ints  # [rows]
    most_keys: int  # of a row
    wanted: Ints  # [wanted]: rows whose logits are


class Buffers(NamedTuple):
    """What the kernel writes. hidden: the embeddings of the rows at first. All bf16, but the logits."""

    hidden: Elements  # [rows, width]
    normalized: Elements  # [rows, width]
    projected: Elements  # [rows, (heads + 2 kv_heads) * dim]
    attended: Elements  # [rows, heads * dim]
    added: Elements  # [rows, width]
    expanded: Elements  # [rows, 2 * gated width]
    gated: Elements  # [rows, gated width]
    last: Elements  # [wanted, width]
    logits: Floats  # [wanted, vocab], rounded to bf16


class Space(NamedTuple):
    """Of one thread, for the work in between."""

    tiles: TileSpace
    scores: Floats  # [heads of a KV head, keys up to a multiple of LANES]
    shares: Floats  # [heads of a KV head]


@inlined
def _normalize(weights: Weights, buffers: Buffers, crew: Crew) -> None:
    row = claim(crew)
    while row < len(buffers.hidden):
        normalize_row(buffers.hidden, weights.norms[0], weights.epsilon, buffers.normalized, row)
        row = claim(crew)
    meet(crew)


@inlined
def _add_and_normalize(weights: Weights, buffers: Buffers, norm: int, crew: Crew) -> None:
    row = claim(crew)
    while row < len(buffers.hidden):
        add_and_normalize_row(
            buffers.hidden, buffers.added, weights.norms[norm], weights.epsilon, buffers.normalized, row
        )
        row = claim(crew)
    meet(crew)


@inlined
def _rotate_and_store(weights: Weights, batch: Batch, buffers: Buffers, layer: int, crew: Crew) -> None:
    row = claim(crew)
    while row < len(buffers.hidden):
        rotate(buffers.projected, batch.cosine, batch.sine, weights.kv.shape[3], row)
        store_row(buffers.projected, weights.kv[layer, 0], weights.kv[layer, 1], batch.write_slots[row], row)
        row = claim(crew)
    meet(crew)


@inlined
def _attend(weights: Weights, batch: Batch, buffers: Buffers, space: Space, layer: int, crew: Crew) -> None:
    keys, values, scaling = weights.kv[layer, 0], weights.kv[layer, 1], weights.scalings[layer : layer + 1]
    kv_heads = keys.shape[1]
    parts = kv_heads if len(buffers.hidden) < FEW_ROWS * crew.threads else 1
    piece = claim(crew)
    while piece < len(buffers.hidden) * parts:
        row, first = piece // parts, piece % parts
        slots = batch.key_slots[batch.first_keys[row] : batch.first_keys[row] + batch.num_keys[row]]
        for kv_head in range(first, first + kv_heads // parts):
            attend_heads(
                buffers.projected, keys, values, slots, scaling,
                space.scores, space.shares, buffers.attended, row, kv_head,
            )  # fmt: skip
        piece = claim(crew)
    meet(crew)


@inlined
def _gate(buffers: Buffers, crew: Crew) -> None:
    row = claim(crew)
    while row < len(buffers.hidden):
        gate_row(buffers.expanded, buffers.gated, row)
        row = claim(crew)
    meet(crew)


@inlined
def _gather(batch: Batch, buffers: Buffers, crew: Crew) -> None:
    row = claim(crew)
    while row < len(batch.wanted):
        for i in range(buffers.last.shape[1]):  # as one assignment it takes seconds to compile
            buffers.last[row, i] = buffers.normalized[batch.wanted[row], i]
        row = claim(crew)
    meet(crew)


@compiled
def run_layers(weights: Weights, batch: Batch, buffers: Buffers, counters: Ints, threads: int) -> None:
    """One thread's part of a forward; all threads of a team call it with the same arguments."""
    crew = Crew(counters, np.ones(1, np.int64), threads)
    dim = weights.kv.shape[4]
    heads = buffers.attended.shape[1] // dim // weights.kv.shape[3]
    space = Space(
        tile_space(max(buffers.hidden.shape[1], buffers.attended.shape[1], buffers.gated.shape[1])),
        np.empty((heads, -(-batch.most_keys // LANES) * LANES), np.float32),
        np.empty(heads, np.float32),
    )
    _normalize(weights, buffers, crew)
    for layer in range(len(weights.panels)):
        panels, rounded = weights.panels[layer], weights.rounded
        project = Matrix(panels[0], rounded, weights.project_biases[layer])
        merge = Matrix(panels[1], rounded, weights.merge_biases[layer])
        expand = Matrix(panels[2], rounded, weights.expand_biases[layer])
        reduce = Matrix(panels[3], rounded, weights.reduce_biases[layer])
        multiply_rows(buffers.normalized, project, space.tiles, buffers.projected, crew)
        _rotate_and_store(weights, batch, buffers, layer, crew)
        _attend(weights, batch, buffers, space, layer, crew)
        multiply_rows(buffers.attended, merge, space.tiles, buffers.added, crew)
        _add_and_normalize(weights, buffers, 2 * layer + 1, crew)
        multiply_rows(buffers.normalized, expand, space.tiles, buffers.expanded, crew)
        _gate(buffers, crew)
        multiply_rows(buffers.gated, reduce, space.tiles, buffers.added, crew)
        _add_and_normalize(weights, buffers, 2 * layer + 2, crew)
    _gather(batch, buffers, crew)
    output = Matrix(weights.output_panels, weights.rounded, weights.output_bias)
    multiply_rows(buffers.last, output, space.tiles, buffers.logits, crew)
