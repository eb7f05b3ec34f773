"""The innermost loops of products and of attention, in registers of 16 float32: numba has no words for them.

Each function writes instructions for LLVM, which optimises them with the kernel around them. Addresses, strides (in
bytes) and counts are int64. What is wrong with an address is not noticed here: callers check shapes. The order of a sum
depends on its own length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""float32 in one register."""
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
TILE_HEADS = 4
"""Heads of attention at most that share keys and values."""

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _PAIRS, _HALVES = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT32, ir.IntType(16)))
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_ZEROS = ir.Constant(_FLOATS, [_FLOAT(0.0)] * LANES)

Builder = Any
Value = Any
"""Of LLVM."""


class _BFloat(type(_FLOAT).__base__):  # type: ignore[misc]
    """llvmlite has no name for it."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_ELEMENTS = ir.VectorType(_BFloat(), 2 * LANES)


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU sums products of bf16 pairs in float32 itself."""
    try:
        return bool(get_host_cpu_features().get("avx512bf16"))
    except RuntimeError:  # LLVM cannot tell on every system
        return False


def _instruction(most: int, num_arguments: int) -> Callable[[Callable[..., None]], Any]:
    """Makes `emit(builder, count, *arguments)` callable by kernels as `name(count, (arguments))`, for counts of 1 to
    `most`: there is a loop of its own for each."""

    def decorated(emit: Callable[..., None]) -> Any:
        def of(_: Any, count: Any, arguments: Any) -> Any:
            def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Any:
                arguments = cgutils.unpack_tuple(builder, values[1], num_arguments)
                end = builder.append_basic_block("end")
                switch = builder.switch(values[0], end)
                for count in range(1, most + 1):
                    block = builder.append_basic_block(f"{emit.__name__}.{count}")
                    switch.add_case(_INT64(count), block)
                    builder.position_at_end(block)
                    emit(builder, count, *arguments)
                    builder.branch(end)
                builder.position_at_end(end)
                return context.get_dummy_value()

            return types.void(types.int64, types.UniTuple(types.int64, num_arguments)), codegen

        return intrinsic(of)

    return decorated


@_instruction(TILE_ROWS, 5)
def multiply_tile(
    builder: Builder, count: int, weights: Value, rows: Value, row_bytes: Value, pairs: Value, out: Value
) -> None:
    """For `count` rows of bf16 pairs and one panel of weights (see `products`): float32 [count, TILE_WIDTH], each the
    sum over the pairs in order."""
    registers = TILE_WIDTH // LANES
    add_products = _function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, _FLOATS, _ELEMENTS, _ELEMENTS)
    sums = _sums(builder, count * registers)
    with _each(builder, pairs) as pair:
        panel = _at(builder, weights, pair, 4 * TILE_WIDTH)
        columns = [_load(builder, _ELEMENTS, builder.add(panel, _INT64(4 * LANES * i)), 64) for i in range(registers)]
        for row in range(count):
            address = builder.add(_at(builder, rows, row_bytes, row), builder.mul(pair, _INT64(4)))
            inputs = builder.bitcast(_repeated(builder, _load(builder, _INT32, address, 4)), _ELEMENTS)
            for total, column in zip(sums[row * registers :], columns, strict=False):
                builder.store(builder.call(add_products, [builder.load(total), column, inputs]), total)
    for i, total in enumerate(sums):
        _store(builder, builder.load(total), _at(builder, out, _INT64(i), 4 * LANES))


@_instruction(TILE_ROUNDED_ROWS, 5)
def multiply_rounded_tile(
    builder: Builder, count: int, weights: Value, rows: Value, row_bytes: Value, groups: Value, out: Value
) -> None:
    """`multiply_tile` with weights of 4 bits, for so many groups of inputs: each is the sum over the groups of scale
    times the sum over levels and inputs, plus the lowest value times the sum of the inputs."""
    registers = TILE_WIDTH // LANES
    add_products = _function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, _FLOATS, _ELEMENTS, _ELEMENTS)
    ones = builder.bitcast(ir.Constant(_WORDS, [ir.IntType(16)(bf16_of(1))] * (2 * LANES)), _ELEMENTS)
    totals, sums, inputs_sums = (_sums(builder, n) for n in (count * registers, count * registers, count))
    with _each(builder, groups) as group:
        block = _at(builder, weights, group, GROUP_BYTES)
        for total in (*sums, *inputs_sums):
            builder.store(_ZEROS, total)
        with _each(builder, _INT64(GROUP // 2)) as pair:
            columns = _levels(builder, _load(builder, _WORDS, _at(builder, block, pair, 4 * LANES), 64), registers)
            index = builder.add(builder.mul(group, _INT64(GROUP // 2)), pair)
            for row in range(count):
                address = builder.add(_at(builder, rows, row_bytes, row), builder.mul(index, _INT64(4)))
                inputs = builder.bitcast(_repeated(builder, _load(builder, _INT32, address, 4)), _ELEMENTS)
                for total, column in zip(
                    (*sums[row * registers : (row + 1) * registers], inputs_sums[row]), (*columns, ones), strict=True
                ):
                    builder.store(builder.call(add_products, [builder.load(total), column, inputs]), total)
        scales = builder.add(block, _INT64(GROUP * TILE_WIDTH // 2))
        for i in range(registers):
            scale = _widened(builder, builder.add(scales, _INT64(2 * LANES * i)))
            lowest = _widened(builder, builder.add(scales, _INT64(2 * TILE_WIDTH + 2 * LANES * i)))
            for row in range(count):
                total = totals[row * registers + i]
                _add_product(builder, total, scale, builder.load(sums[row * registers + i]))
                _add_product(builder, total, lowest, builder.load(inputs_sums[row]))
    for i, total in enumerate(totals):
        _store(builder, builder.load(total), _at(builder, out, _INT64(i), 4 * LANES))


def bf16_of(value: int) -> int:
    """The bits of a small integer."""
    return int(np.float32(value).view(np.uint32)) >> 16


def _levels(builder: Builder, words: Value, count: int) -> list[Value]:
    """Registers of bf16 from 4 bits of each word in turn. What lies above these 4 bits is ignored: the table is looked
    up with 5, and has everything twice."""
    table = ir.Constant(_WORDS, [ir.IntType(16)(bf16_of(i % 16)) for i in range(2 * LANES)])
    look_up = _function(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, _WORDS, _WORDS)
    shifts = [ir.Constant(_WORDS, [ir.IntType(16)(4 * i)] * (2 * LANES)) for i in range(count)]
    return [builder.bitcast(builder.call(look_up, [table, builder.lshr(words, shift)]), _ELEMENTS) for shift in shifts]


@_instruction(TILE_HEADS, 9)
def score_keys(
    builder: Builder, count: int, query: Value, query_bytes: Value, keys: Value, key_bytes: Value, slots: Value,
    num_keys: Value, registers: Value, scores: Value, score_bytes: Value,
) -> None:  # fmt: skip
    """For `count` heads that share keys: query times key, to scores float32 [count, keys]. query: float32, of so many
    registers; keys: bf16, each at a slot."""
    reduce = _function(builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, _FLOAT, _FLOATS)
    sums = _sums(builder, count)
    with _each(builder, num_keys) as key:
        row = _row(builder, keys, key_bytes, slots, key)
        for total in sums:
            builder.store(_ZEROS, total)
        with _each(builder, registers) as register:
            elements = _widened(builder, _at(builder, row, register, 2 * LANES))
            for head, total in enumerate(sums):
                address = _at(builder, _at(builder, query, query_bytes, head), register, 4 * LANES)
                asked = _load(builder, _FLOATS, address, 4)
                _add_product(builder, total, asked, elements)
        for head, total in enumerate(sums):
            score = builder.call(reduce, [_FLOAT(0.0), builder.load(total)], fastmath=("reassoc",))
            _store(builder, score, _at(builder, _at(builder, scores, score_bytes, head), key, 4))


def _mix(builder: Builder, registers: int, heads: int, weights: Value, weight_bytes: Value, values: Value,
         value_bytes: Value, slots: Value, num_keys: Value, out: Value, out_bytes: Value) -> None:  # fmt: skip
    sums = _sums(builder, heads * registers)
    with _each(builder, num_keys) as key:
        row = _row(builder, values, value_bytes, slots, key)
        elements = [_widened(builder, builder.add(row, _INT64(2 * LANES * i))) for i in range(registers)]
        for head in range(heads):
            weight = _load(builder, _FLOAT, _at(builder, _at(builder, weights, weight_bytes, head), key, 4), 4)
            repeated = _repeated(builder, weight)
            for total, element in zip(sums[head * registers :], elements, strict=False):
                _add_product(builder, total, repeated, element)
    for i, total in enumerate(sums):
        head, register = divmod(i, registers)
        address = builder.add(_at(builder, out, out_bytes, head), _INT64(4 * LANES * register))
        _store(builder, builder.load(total), address)


@_instruction(TILE_HEADS, 8)
def mix_values(builder: Builder, count: int, *arguments: Value) -> None:
    """For `count` heads that share values: the sum of weights, float32 [count, keys], times values, over the keys in
    order, to out float32 [count, 4 * LANES]. values: bf16, each at a slot."""
    _mix(builder, 4, count, *arguments)


@_instruction(TILE_HEADS, 8)
def mix_few_values(builder: Builder, count: int, *arguments: Value) -> None:
    """`mix_values` of LANES elements."""
    _mix(builder, 1, count, *arguments)


@contextmanager
def _each(builder: Builder, count: Value) -> Iterator[Value]:
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


def _sums(builder: Builder, count: int) -> list[Value]:
    """Variables of one register, zero; LLVM keeps them in registers."""
    sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(count)]
    for total in sums:
        builder.store(_ZEROS, total)
    return sums


def _add_product(builder: Builder, total: Value, one: Value, other: Value) -> None:
    """To the variable `total`, with one rounding."""
    add = _function(builder, "llvm.fma.v16f32", _FLOATS, _FLOATS, _FLOATS, _FLOATS)
    builder.store(builder.call(add, [one, other, builder.load(total)]), total)


def _function(builder: Builder, name: str, returned: Any, *arguments: Any) -> Value:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, arguments), name)


def _at(builder: Builder, address: Value, index: Value, stride: int) -> Value:
    return builder.add(address, builder.mul(index, _INT64(stride)))


def _row(builder: Builder, rows: Value, row_bytes: Value, slots: Value, index: Value) -> Value:
    """Address of the row at the slot of that index."""
    slot = _load(builder, _INT64, _at(builder, slots, index, 8), 8)
    return builder.add(rows, builder.mul(slot, row_bytes))


def _load(builder: Builder, kind: Any, address: Value, align: int) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _store(builder: Builder, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _widened(builder: Builder, address: Value) -> Value:
    """LANES of bf16 as float32."""
    wide = builder.zext(_load(builder, _HALVES, address, 2), _PAIRS)
    return builder.bitcast(builder.shl(wide, ir.Constant(_PAIRS, [_INT32(16)] * LANES)), _FLOATS)


def _repeated(builder: Builder, value: Value) -> Value:
    """The value in every lane."""
    kind = ir.VectorType(value.type, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, _INT32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_PAIRS, [_INT32(0)] * LANES))
