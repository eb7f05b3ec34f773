"""Sums of products of pairs of bf16 in registers: by the CPU's own instruction, or in float32.

A pair is two neighbours in memory. With the instruction it is taken as it is. Without, it is taken in two *parts*, the
first and the second, each widened to float32, which is exact; a sum goes over the pairs and their parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features

from specdec.engine.compiled.vectors import (
    BFLOAT,
    FLOAT,
    FLOATS,
    HALVES,
    INT32,
    INT64,
    LANES,
    PAIRS,
    WORDS,
    Builder,
    Value,
    add_product,
    at,
    constant,
    each,
    function,
    load,
    load_widened,
    repeated,
    shuffled,
    store,
    widened,
)

_ELEMENTS = ir.VectorType(BFLOAT, 2 * LANES)


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU sums products of bf16 pairs in float32 itself."""
    return bool(_features().get("avx512bf16"))


@cache
def runs_tiles() -> bool:
    """Whether products in tiles are quick here: the CPU multiplies and adds eight float32 at once, at least."""
    return multiplies_bf16() or bool(_features().get("avx2") and _features().get("fma"))


@cache
def most_sums() -> int:
    """How many sums of LANES float32 the registers hold, beside what is added to them."""
    return 24 if _features().get("avx512f") else 6


@cache
def _features() -> dict[str, bool]:
    try:
        return dict(get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell on every system
        return {}


def at_once(count: int, registers: int) -> int:
    """Of so many registers, a part that divides them and whose sums with `count` others the CPU holds."""
    return next(size for size in (registers, registers // 2, 1) if size * count <= max(most_sums(), count))


def parts() -> Sequence[int]:
    return range(1) if multiplies_bf16() else range(2)


def add_products(builder: Builder, total: Value, one: Value, other: Value) -> None:
    """To each lane of the variable `total`, the products of this part of its pairs."""
    if not multiplies_bf16():
        add_product(builder, total, one, other)
        return
    add = function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, FLOATS, _ELEMENTS, _ELEMENTS)
    builder.store(builder.call(add, [builder.load(total), one, other]), total)


def load_pairs(builder: Builder, address: Value, part: int, align: int) -> Value:
    return _part(builder, load(builder, PAIRS, address, align), part)


def load_half(builder: Builder, address: Value, part: int) -> Value:
    """LANES of bf16, and as many zeros behind them."""
    nothing = ir.Constant(HALVES, [ir.IntType(16)(0)] * LANES)
    elements = shuffled(builder, load(builder, HALVES, address, 2), nothing, range(2 * LANES))
    return _part(builder, builder.bitcast(elements, PAIRS), part)


def load_levels(builder: Builder, address: Value, register: int, part: int) -> Value:
    """Pairs of numbers of 4 bits, those at the place of this register in each word."""
    if not multiplies_bf16():
        bits = builder.lshr(load(builder, PAIRS, address, 64), _in_each(4 * register + 16 * part))
        return builder.sitofp(builder.and_(bits, _in_each(15)), FLOATS)
    shift = ir.Constant(WORDS, [ir.IntType(16)(4 * register)] * (2 * LANES))
    words = builder.lshr(load(builder, WORDS, address, 64), shift)
    # What lies above 4 bits is ignored: the table is looked up with 5, and has everything twice.
    table = ir.Constant(WORDS, [ir.IntType(16)(_bits(i % 16)) for i in range(2 * LANES)])
    look_up = function(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, WORDS, WORDS)
    return builder.bitcast(builder.call(look_up, [table, words]), _ELEMENTS)


def ones(builder: Builder) -> Value:
    """One part of pairs."""
    if not multiplies_bf16():
        return constant(1.0)
    return builder.bitcast(ir.Constant(WORDS, [ir.IntType(16)(_bits(1))] * (2 * LANES)), _ELEMENTS)


class Inputs:
    """One row of a product, each of whose pairs meets a register of others. Where they are taken in parts, all of it is
    widened first."""

    def __init__(self, builder: Builder, row: Value, pairs: Value, wide: Value) -> None:
        """row: address of the pairs. wide: of memory for the elements as float32."""
        self._builder = builder
        self._row, self._wide = row, wide
        if not multiplies_bf16():
            _widen(builder, row, pairs, wide)

    def part(self, pair: Value, part: int) -> Value:
        """In every lane."""
        builder = self._builder
        if multiplies_bf16():
            bits = repeated(builder, load(builder, INT32, at(builder, self._row, pair, 4), 4))
            return builder.bitcast(bits, _ELEMENTS)
        place = builder.add(at(builder, self._wide, pair, 8), INT64(4 * part))
        return repeated(builder, load(builder, FLOAT, place, 4))


def _widen(builder: Builder, row: Value, pairs: Value, wide: Value) -> None:
    registers = builder.sdiv(pairs, INT64(LANES // 2))
    with each(builder, registers) as i:
        store(builder, load_widened(builder, at(builder, row, i, 2 * LANES)), at(builder, wide, i, 4 * LANES))
    done = builder.mul(registers, INT64(LANES // 2))
    with each(builder, builder.sub(pairs, done)) as i:
        pair = builder.add(done, i)
        bits = load(builder, INT32, at(builder, row, pair, 4), 4)
        for part, element in enumerate((builder.shl(bits, INT32(16)), builder.and_(bits, INT32(0xFFFF0000)))):
            store(builder, element, builder.add(at(builder, wide, pair, 8), INT64(4 * part)))


def rounded(builder: Builder, values: Value) -> Value:
    """float32 as bf16, to the nearest even. What is no number stays so."""
    if multiplies_bf16():
        kind = ir.VectorType(BFLOAT, LANES)
        return builder.call(function(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, FLOATS), [values])
    bits = builder.bitcast(values, PAIRS)
    high = builder.lshr(bits, _in_each(16))
    up = builder.add(builder.and_(high, _in_each(1)), _in_each(0x7FFF))
    nearest = builder.lshr(builder.add(bits, up), _in_each(16))
    is_number = builder.fcmp_ordered("ord", values, values)
    return builder.trunc(builder.select(is_number, nearest, builder.or_(high, _in_each(0x40))), HALVES)


def narrowed(builder: Builder, values: Value) -> Value:
    """float32 of what bf16 holds of float32."""
    return widened(builder, builder.bitcast(rounded(builder, values), HALVES))


def _part(builder: Builder, bits: Value, part: int) -> Value:
    if multiplies_bf16():
        return builder.bitcast(bits, _ELEMENTS)
    element = builder.and_(bits, _in_each(0xFFFF0000)) if part else builder.shl(bits, _in_each(16))
    return builder.bitcast(element, FLOATS)


def _in_each(value: int) -> Value:
    return ir.Constant(PAIRS, [INT32(value)] * LANES)


def _bits(value: int) -> int:
    """Of a small integer as bf16."""
    return int(np.float32(value).view(np.uint32)) >> 16
