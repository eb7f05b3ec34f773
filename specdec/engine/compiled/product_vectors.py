"""The innermost loops of products in registers (see `vectors`). The order of a sum depends on its own length alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from specdec.engine.compiled.pairs import (
    Inputs,
    add_products,
    at_once,
    load_levels,
    load_pairs,
    narrowed,
    ones,
    parts,
    rounded,
)
from specdec.engine.compiled.vectors import (
    FLOATS,
    INT64,
    LANES,
    Builder,
    Value,
    add_product,
    at,
    constant,
    each,
    instructions,
    load,
    load_widened,
    store,
    variables,
)

REGISTERS = 4
TILE_WIDTH = REGISTERS * LANES
"""Outputs of a product that are summed together."""
TILE_ROWS = 6
"""Rows of a product at most: 24 sums, 4 registers of weights and one of inputs are 29 of 32 wide registers. Of 16
narrow ones, 6 sums of two each leave four."""
TILE_ROUNDED_ROWS = 3
"""The same with weights of 4 bits: 12 sums of a group and 12 of all groups."""
GROUP = 32
"""Inputs whose weights of 4 bits share a scale."""
GROUP_BYTES = GROUP * TILE_WIDTH // 2 + 2 * TILE_WIDTH * 2
"""Of one panel: levels of 4 bits, then scales and lowest values in bf16."""


@instructions(TILE_ROWS, 7)
def multiply_tile(
    builder: Builder, count: int, weights: Value, rows: Value, row_bytes: Value, pairs: Value, wide: Value,
    wide_bytes: Value, out: Value,
) -> None:  # fmt: skip
    """For `count` rows of bf16 pairs and one panel of weights (see `products`): float32 [count, TILE_WIDTH], each the
    sum over the pairs in order. wide: for the work in between, float32 [count, inputs]."""
    inputs = _inputs(builder, count, rows, row_bytes, pairs, wide, wide_bytes)
    size = at_once(count, REGISTERS)
    for first in range(0, REGISTERS, size):
        sums = [variables(builder, size) for _ in inputs]
        with each(builder, pairs) as pair:
            panel = builder.add(at(builder, weights, pair, 4 * TILE_WIDTH), INT64(4 * LANES * first))
            for part in parts():
                columns = [load_pairs(builder, builder.add(panel, INT64(4 * LANES * i)), part, 64) for i in range(size)]
                for row, totals in zip(inputs, sums, strict=True):
                    element = row.part(pair, part)
                    for total, column in zip(totals, columns, strict=True):
                        add_products(builder, total, column, element)
        for number, totals in enumerate(sums):
            for i, total in enumerate(totals, start=number * REGISTERS + first):
                store(builder, builder.load(total), at(builder, out, INT64(i), 4 * LANES))


def _inputs(
    builder: Builder, count: int, rows: Value, row_bytes: Value, pairs: Value, wide: Value, wide_bytes: Value
) -> list[Inputs]:
    places = [(at(builder, rows, row_bytes, i), at(builder, wide, wide_bytes, i)) for i in range(count)]
    return [Inputs(builder, row, pairs, place) for row, place in places]


@instructions(TILE_ROUNDED_ROWS, 7)
def multiply_rounded_tile(
    builder: Builder, count: int, weights: Value, rows: Value, row_bytes: Value, groups: Value, wide: Value,
    wide_bytes: Value, out: Value,
) -> None:  # fmt: skip
    """`multiply_tile` with weights of 4 bits, for so many groups of inputs: each is the sum over the groups of scale
    times the sum over levels and inputs, plus the lowest value times the sum of the inputs."""
    pairs = builder.mul(groups, INT64(GROUP // 2))
    inputs = _inputs(builder, count, rows, row_bytes, pairs, wide, wide_bytes)
    totals = [variables(builder, REGISTERS) for _ in inputs]
    inputs_sums = variables(builder, count)
    size = at_once(2 * count, REGISTERS)
    with each(builder, groups) as group:
        block = at(builder, weights, group, GROUP_BYTES)
        for total in inputs_sums:
            builder.store(constant(0.0), total)
        for first in range(0, REGISTERS, size):
            _add_group(builder, block, group, inputs, range(first, first + size), totals, inputs_sums)
    for i, total in enumerate(chain.from_iterable(totals)):
        store(builder, builder.load(total), at(builder, out, INT64(i), 4 * LANES))


def _add_group(
    builder: Builder, block: Value, group: Value, inputs: Sequence[Inputs], registers: range,
    totals: Sequence[Sequence[Value]], inputs_sums: Sequence[Value],
) -> None:  # fmt: skip
    """To the totals of these registers. The first of all makes the sums of the inputs too."""
    sums = [variables(builder, len(registers)) for _ in inputs]
    every = ones(builder)
    for total in chain.from_iterable(sums):
        builder.store(constant(0.0), total)
    with each(builder, INT64(GROUP // 2)) as i:
        pair = builder.add(builder.mul(group, INT64(GROUP // 2)), i)
        words = at(builder, block, i, 4 * LANES)
        for part in parts():
            columns = [load_levels(builder, words, register, part) for register in registers]
            for row, some, inputs_sum in zip(inputs, sums, inputs_sums, strict=True):
                element = row.part(pair, part)
                for total, column in zip(some, columns, strict=True):
                    add_products(builder, total, column, element)
                if registers.start == 0:
                    add_products(builder, inputs_sum, every, element)
    scales = builder.add(block, INT64(GROUP * TILE_WIDTH // 2))
    for register, i in enumerate(registers):
        scale = load_widened(builder, builder.add(scales, INT64(2 * LANES * i)))
        lowest = load_widened(builder, builder.add(scales, INT64(2 * TILE_WIDTH + 2 * LANES * i)))
        for total, some, inputs_sum in zip(totals, sums, inputs_sums, strict=True):
            add_product(builder, total[i], scale, builder.load(some[register]))
            add_product(builder, total[i], lowest, builder.load(inputs_sum))


@instructions(REGISTERS, 3)
def finish_sums(builder: Builder, count: int, sums: Value, bias: Value, out: Value) -> None:
    """So many registers of sums plus bias, rounded to bf16."""
    for i in range(count):
        store(builder, rounded(builder, _with_bias(builder, i, sums, bias)), at(builder, out, INT64(i), 2 * LANES))


@instructions(REGISTERS, 3)
def finish_wide_sums(builder: Builder, count: int, sums: Value, bias: Value, out: Value) -> None:
    """`finish_sums`, written as float32."""
    for i in range(count):
        store(builder, narrowed(builder, _with_bias(builder, i, sums, bias)), at(builder, out, INT64(i), 4 * LANES))


def _with_bias(builder: Builder, index: int, sums: Value, bias: Value) -> Value:
    one, other = (load(builder, FLOATS, at(builder, address, INT64(index), 4 * LANES), 4) for address in (sums, bias))
    return builder.fadd(one, other)
