"""Words for loops over 16 float32 at a time, which numba lacks.

Each function writes instructions for LLVM, which optimises them with the kernel around them. Addresses, strides (in
bytes) and counts are int64. What is wrong with an address is not noticed here: callers check shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

CACHE_LINE = 64
"""Bytes."""
LANES = 16
"""float32 in one register."""

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, PAIRS, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, INT32, ir.IntType(16)))
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)

Builder = Any
Value = Any
"""Of LLVM."""


class _BFloat(type(FLOAT).__base__):  # type: ignore[misc]
    """llvmlite has no name for it."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BFLOAT = _BFloat()


def instruction(num_arguments: int) -> Callable[[Callable[..., None]], Any]:
    """Makes `emit(builder, *arguments)` callable by kernels as `name((arguments))`."""

    def decorated(emit: Callable[..., None]) -> Any:
        def of(_: Any, arguments: Any) -> Any:
            def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Any:
                emit(builder, *cgutils.unpack_tuple(builder, values[0], num_arguments))
                return context.get_dummy_value()

            return types.void(types.UniTuple(types.int64, num_arguments)), codegen

        return intrinsic(of)

    return decorated


def instructions(most: int, num_arguments: int) -> Callable[[Callable[..., None]], Any]:
    """Makes `emit(builder, count, *arguments)` callable by kernels as `name(count, (arguments))`, for counts of 1 to
    `most`: there is a loop of its own for each. Other counts do nothing."""

    def decorated(emit: Callable[..., None]) -> Any:
        def of(_: Any, count: Any, arguments: Any) -> Any:
            def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Any:
                arguments = cgutils.unpack_tuple(builder, values[1], num_arguments)
                end = builder.append_basic_block("end")
                switch = builder.switch(values[0], end)
                for count in range(1, most + 1):
                    block = builder.append_basic_block(f"{emit.__name__}.{count}")
                    switch.add_case(INT64(count), block)
                    builder.position_at_end(block)
                    emit(builder, count, *arguments)
                    builder.branch(end)
                builder.position_at_end(end)
                return context.get_dummy_value()

            return types.void(types.int64, types.UniTuple(types.int64, num_arguments)), codegen

        return intrinsic(of)

    return decorated


def constant(value: float) -> Value:
    """In every lane."""
    return ir.Constant(FLOATS, [FLOAT(value)] * LANES)


@contextmanager
def each(builder: Builder, count: Value) -> Iterator[Value]:
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


def variables(builder: Builder, count: int) -> list[Value]:
    """Of one register each, zero; LLVM keeps them in registers."""
    found = [cgutils.alloca_once(builder, FLOATS) for _ in range(count)]
    for variable in found:
        builder.store(constant(0.0), variable)
    return found


def add_product(builder: Builder, total: Value, one: Value, other: Value) -> None:
    """To the variable `total`."""
    builder.store(fused(builder, one, other, builder.load(total)), total)


def fused(builder: Builder, one: Value, other: Value, added: Value) -> Value:
    """one * other + added, with one rounding."""
    return builder.call(function(builder, "llvm.fma.v16f32", FLOATS, FLOATS, FLOATS, FLOATS), [one, other, added])


def function(builder: Builder, name: str, returned: Any, *arguments: Any) -> Value:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, arguments), name)


def at(builder: Builder, address: Value, index: Value, stride: int) -> Value:
    return builder.add(address, builder.mul(index, INT64(stride)))


def row_at(builder: Builder, rows: Value, row_bytes: Value, slots: Value, index: Value) -> Value:
    """Address of the row at the slot of that index."""
    slot = load(builder, INT64, at(builder, slots, index, 8), 8)
    return builder.add(rows, builder.mul(slot, row_bytes))


def load(builder: Builder, kind: Any, address: Value, align: int) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Builder, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


def fetch(builder: Builder, address: Value, num_bytes: Value) -> None:
    """Begins to bring so many bytes into the second cache, and goes on."""
    with each(builder, builder.sdiv(builder.add(num_bytes, INT64(CACHE_LINE - 1)), INT64(CACHE_LINE))) as line:
        fetch_lines(builder, at(builder, address, line, CACHE_LINE), CACHE_LINE)


def fetch_lines(builder: Builder, address: Value, num_bytes: int) -> None:
    """`fetch`, without a loop."""
    pointer = ir.IntType(8).as_pointer()
    prefetch = function(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, INT32, INT32, INT32)
    for begin in range(0, num_bytes, CACHE_LINE):
        place = builder.inttoptr(builder.add(address, INT64(begin)), pointer)
        builder.call(prefetch, [place, INT32(0), INT32(2), INT32(1)])


def load_widened(builder: Builder, address: Value) -> Value:
    """LANES of bf16 as float32."""
    return widened(builder, load(builder, HALVES, address, 2))


def widened(builder: Builder, bits: Value) -> Value:
    """The same of their bits."""
    wide = builder.zext(bits, PAIRS)
    return builder.bitcast(builder.shl(wide, ir.Constant(PAIRS, [INT32(16)] * LANES)), FLOATS)


def repeated(builder: Builder, value: Value) -> Value:
    """The value in every lane."""
    kind = ir.VectorType(value.type, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, INT32(0))
    return shuffled(builder, first, first, [0] * LANES)


def shuffled(builder: Builder, one: Value, other: Value, lanes: Sequence[int]) -> Value:
    """The lanes of both, those of the other numbered behind those of the one."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, len(lanes)), list(map(INT32, lanes))))
