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
    multiplies_bf16,
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
    fetch_lines,
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
BLOCK = 8
"""Pairs of inputs after which the next registers of a panel are taken, where the CPU has too few for all of them: what
the first of them brought from memory is still in the first cache."""
AHEAD = 8192
"""Bytes of a panel that are fetched ahead there: read in parts, it is no stream that the CPU would know."""
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
    tile = _Tile(builder, inputs, weights, out)
    size = at_once(count, REGISTERS)
    if multiplies_bf16():
        tile.add(range(REGISTERS), pairs)
        return
    with each(builder, builder.sdiv(builder.add(pairs, INT64(BLOCK - 1)), INT64(BLOCK))) as block:
        begin = builder.mul(block, INT64(BLOCK))
        left = builder.sub(pairs, begin)
        length = builder.select(builder.icmp_signed("<", left, INT64(BLOCK)), left, INT64(BLOCK))
        for first in range(0, REGISTERS, size):
            tile.add(range(first, first + size), length, begin)


class _Tile:
    """Sums of a tile of rows and a panel, in the making."""

    def __init__(self, builder: Builder, inputs: Sequence[Inputs], weights: Value, out: Value) -> None:
        self._builder = builder
        self._inputs = inputs
        self._weights, self._out = weights, out

    def add(self, registers: range, num_pairs: Value, begin: Value | None = None) -> None:
        """To the sums of these registers of the panel, so many pairs. begin: those of a block from there on, the blocks
        in order; the first registers of each fetch ahead for all. None: there is one pass."""
        builder = self._builder
        sums = [self._sums(row, registers, begin) for row in range(len(self._inputs))]
        with each(builder, num_pairs) as i:
            pair = i if begin is None else builder.add(begin, i)
            panel = at(builder, self._weights, pair, 4 * TILE_WIDTH)
            if begin is not None and registers.start == 0:
                fetch_lines(builder, builder.add(panel, INT64(AHEAD)), 4 * TILE_WIDTH)
            for part in parts():
                places = [builder.add(panel, INT64(4 * LANES * register)) for register in registers]
                columns = [load_pairs(builder, place, part, 64) for place in places]
                for row, totals in zip(self._inputs, sums, strict=True):
                    element = row.part(pair, part)
                    for total, column in zip(totals, columns, strict=True):
                        add_products(builder, total, column, element)
        for number, totals in enumerate(sums):
            for register, total in zip(registers, totals, strict=True):
                store(builder, builder.load(total), self._place(number, register))

    def _sums(self, row: int, registers: range, begin: Value | None) -> list[Value]:
        builder = self._builder
        sums = variables(builder, len(registers))
        if begin is not None:
            is_first = builder.icmp_signed("==", begin, INT64(0))
            for register, total in zip(registers, sums, strict=True):
                so_far = load(builder, FLOATS, self._place(row, register), 4)
                builder.store(builder.select(is_first, constant(0.0), so_far), total)
        return sums

    def _place(self, row: int, register: int) -> Value:
        return at(self._builder, self._out, INT64(row * REGISTERS + register), 4 * LANES)


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
