"""The innermost loops of products in registers (see `vectors`). The order of a sum depends on its own length alone."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from specdec.engine.compiled.vectors import (
    ELEMENTS,
    FLOATS,
    INT32,
    INT64,
    LANES,
    WORDS,
    Builder,
    Value,
    add_product,
    add_products,
    at,
    constant,
    each,
    function,
    instructions,
    load,
    load_widened,
    narrowed,
    repeated,
    rounded,
    store,
    variables,
)

TILE_WIDTH = 4 * LANES
"""Outputs of a product that are summed together."""
TILE_ROWS = 6
"""Rows of a product at most: 24 sums, 4 registers of weights and one of inputs are 29 of 32 registers."""
TILE_ROUNDED_ROWS = 3
"""The same with weights of 4 bits: 12 sums of a group and 12 of all groups."""
GROUP = 32
"""Inputs whose weights of 4 bits share a scale."""
GROUP_BYTES = GROUP * TILE_WIDTH // 2 + 2 * TILE_WIDTH * 2
"""Of one panel: levels of 4 bits, then scales and lowest values in bf16."""


@instructions(TILE_ROWS, 5)
def multiply_tile(
    builder: Builder, count: int, weights: Value, rows: Value, row_bytes: Value, pairs: Value, out: Value
) -> None:
    """For `count` rows of bf16 pairs and one panel of weights (see `products`): float32 [count, TILE_WIDTH], each the
    sum over the pairs in order."""
    registers = TILE_WIDTH // LANES
    sums = variables(builder, count * registers)
    with each(builder, pairs) as pair:
        panel = at(builder, weights, pair, 4 * TILE_WIDTH)
        columns = [load(builder, ELEMENTS, builder.add(panel, INT64(4 * LANES * i)), 64) for i in range(registers)]
        for row in range(count):
            address = builder.add(at(builder, rows, row_bytes, row), builder.mul(pair, INT64(4)))
            inputs = builder.bitcast(repeated(builder, load(builder, INT32, address, 4)), ELEMENTS)
            for total, column in zip(sums[row * registers :], columns, strict=False):
                add_products(builder, total, column, inputs)
    for i, total in enumerate(sums):
        store(builder, builder.load(total), at(builder, out, INT64(i), 4 * LANES))


@instructions(TILE_ROUNDED_ROWS, 5)
def multiply_rounded_tile(
    builder: Builder, count: int, weights: Value, rows: Value, row_bytes: Value, groups: Value, out: Value
) -> None:
    """`multiply_tile` with weights of 4 bits, for so many groups of inputs: each is the sum over the groups of scale
    times the sum over levels and inputs, plus the lowest value times the sum of the inputs."""
    registers = TILE_WIDTH // LANES
    ones = builder.bitcast(ir.Constant(WORDS, [ir.IntType(16)(bf16_of(1))] * (2 * LANES)), ELEMENTS)
    totals, sums, inputs_sums = (variables(builder, n) for n in (count * registers, count * registers, count))
    with each(builder, groups) as group:
        block = at(builder, weights, group, GROUP_BYTES)
        for total in (*sums, *inputs_sums):
            builder.store(constant(0.0), total)
        with each(builder, INT64(GROUP // 2)) as pair:
            columns = _levels(builder, load(builder, WORDS, at(builder, block, pair, 4 * LANES), 64), registers)
            index = builder.add(builder.mul(group, INT64(GROUP // 2)), pair)
            for row in range(count):
                address = builder.add(at(builder, rows, row_bytes, row), builder.mul(index, INT64(4)))
                inputs = builder.bitcast(repeated(builder, load(builder, INT32, address, 4)), ELEMENTS)
                for total, column in zip(
                    (*sums[row * registers : (row + 1) * registers], inputs_sums[row]), (*columns, ones), strict=True
                ):
                    add_products(builder, total, column, inputs)
        scales = builder.add(block, INT64(GROUP * TILE_WIDTH // 2))
        for i in range(registers):
            scale = load_widened(builder, builder.add(scales, INT64(2 * LANES * i)))
            lowest = load_widened(builder, builder.add(scales, INT64(2 * TILE_WIDTH + 2 * LANES * i)))
            for row in range(count):
                total = totals[row * registers + i]
                add_product(builder, total, scale, builder.load(sums[row * registers + i]))
                add_product(builder, total, lowest, builder.load(inputs_sums[row]))
    for i, total in enumerate(totals):
        store(builder, builder.load(total), at(builder, out, INT64(i), 4 * LANES))


@instructions(TILE_WIDTH // LANES, 3)
def finish_sums(builder: Builder, count: int, sums: Value, bias: Value, out: Value) -> None:
    """So many registers of sums plus bias, rounded to bf16."""
    for i in range(count):
        store(builder, rounded(builder, _with_bias(builder, i, sums, bias)), at(builder, out, INT64(i), 2 * LANES))


@instructions(TILE_WIDTH // LANES, 3)
def finish_wide_sums(builder: Builder, count: int, sums: Value, bias: Value, out: Value) -> None:
    """`finish_sums`, written as float32."""
    for i in range(count):
        store(builder, narrowed(builder, _with_bias(builder, i, sums, bias)), at(builder, out, INT64(i), 4 * LANES))


def _with_bias(builder: Builder, index: int, sums: Value, bias: Value) -> Value:
    one, other = (load(builder, FLOATS, at(builder, address, INT64(index), 4 * LANES), 4) for address in (sums, bias))
    return builder.fadd(one, other)


def bf16_of(value: int) -> int:
    """The bits of a small integer."""
    return int(np.float32(value).view(np.uint32)) >> 16


def _levels(builder: Builder, words: Value, count: int) -> list[Value]:
    """Registers of bf16 from 4 bits of each word in turn. What lies above these 4 bits is ignored: the table is looked
    up with 5, and has everything twice."""
    table = ir.Constant(WORDS, [ir.IntType(16)(bf16_of(i % 16)) for i in range(2 * LANES)])
    look_up = function(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, WORDS, WORDS)
    shifts = [ir.Constant(WORDS, [ir.IntType(16)(4 * i)] * (2 * LANES)) for i in range(count)]
    return [builder.bitcast(builder.call(look_up, [table, builder.lshr(words, shift)]), ELEMENTS) for shift in shifts]
