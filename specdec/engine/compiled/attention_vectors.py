"""The innermost loops of attention over bf16 keys and values where they lie, in registers (see `vectors`).

The order of a sum depends on its own length alone. What is no number stays so.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from specdec.engine.compiled.pairs import (
    add_products,
    at_once,
    load_half,
    load_pairs,
    most_sums,
    narrowed,
    parts,
    rounded,
)
from specdec.engine.compiled.vectors import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    LANES,
    PAIRS,
    Builder,
    Value,
    add_product,
    at,
    constant,
    each,
    fetch,
    function,
    fused,
    instruction,
    instructions,
    load,
    load_widened,
    repeated,
    row_at,
    shuffled,
    store,
    variables,
)

TILE_HEADS = 4
"""Heads at most whose values are mixed together."""
_PAIRED = 2 * LANES
"""Elements of bf16 in one register."""


def _in_quarters(*lanes: int) -> list[int]:
    """In each quarter of a register, these four lanes of a quarter of the one (0 to 3) or the other (4 to 7)."""
    return [quarter + lane % 4 + LANES * (lane // 4) for quarter in range(0, LANES, 4) for lane in lanes]


def _quarters(*quarters: int) -> list[int]:
    """Whole quarters of the one (0 to 3) or the other (4 to 7)."""
    return [4 * quarter + lane for quarter in quarters for lane in range(4)]


_FOLDS = (
    (_in_quarters(0, 4, 1, 5), _in_quarters(2, 6, 3, 7)),
    (_in_quarters(0, 1, 4, 5), _in_quarters(2, 3, 6, 7)),
    (_quarters(0, 1, 4, 5), _quarters(2, 3, 6, 7)),
    (_quarters(0, 2, 4, 6), _quarters(1, 3, 5, 7)),
)
"""Lanes of two registers that are added to make one: after the last of these, lane i is the sum of register i."""


@instruction(5)
def rotate_heads(builder: Builder, elements: Value, heads: Value, dim: Value, cosine: Value, sine: Value) -> None:
    """Turns each head by its position, with the roundings of the stock layers. elements: bf16 [heads, dim]; cosine,
    sine: bf16 [dim]; dim: a multiple of 2 * LANES."""
    with each(builder, builder.sdiv(dim, INT64(2 * LANES))) as register:
        low_bytes = builder.mul(register, INT64(2 * LANES))
        high_bytes = builder.add(low_bytes, dim)  # bytes of half a head
        places = (low_bytes, high_bytes)
        low_cosine, high_cosine = (load_widened(builder, builder.add(cosine, place)) for place in places)
        low_sine, high_sine = (load_widened(builder, builder.add(sine, place)) for place in places)
        with each(builder, heads) as head:
            start = builder.add(elements, builder.mul(head, builder.mul(dim, INT64(2))))
            low_at, high_at = (builder.add(start, place) for place in places)
            low, high = load_widened(builder, low_at), load_widened(builder, high_at)
            straight = narrowed(builder, builder.fmul(low, low_cosine))
            turned = narrowed(builder, builder.fmul(high, low_sine))
            store(builder, rounded(builder, builder.fsub(straight, turned)), low_at)
            straight = narrowed(builder, builder.fmul(high, high_cosine))
            turned = narrowed(builder, builder.fmul(low, high_sine))
            store(builder, rounded(builder, builder.fadd(straight, turned)), high_at)


@instruction(11)
def score_keys(
    builder: Builder, query: Value, query_bytes: Value, heads: Value, dim: Value, keys: Value, values: Value,
    row_bytes: Value, slots: Value, num_keys: Value, scores: Value, score_bytes: Value,
) -> None:  # fmt: skip
    """For heads that share keys: query times key, to scores float32 [heads, keys], and minus infinity behind them to a
    multiple of LANES. query, keys, values: bf16, each key and value at a slot; dim: a multiple of LANES. Values are
    fetched, since they are read next."""
    last, head_bytes = builder.sub(num_keys, INT64(1)), builder.mul(dim, INT64(2))
    with each(builder, _registers(builder, num_keys)) as register:
        first = builder.mul(register, INT64(LANES))
        indices = [_smaller(builder, builder.add(first, INT64(i)), last) for i in range(LANES)]
        rows = [row_at(builder, keys, row_bytes, slots, index) for index in indices]
        for index in indices:
            fetch(builder, row_at(builder, values, row_bytes, slots, index), head_bytes)
            ahead = _smaller(builder, builder.add(index, INT64(LANES)), last)
            fetch(builder, row_at(builder, keys, row_bytes, slots, ahead), head_bytes)
        left = repeated(builder, builder.trunc(builder.sub(num_keys, first), INT32))
        is_key = builder.icmp_signed("<", ir.Constant(PAIRS, [INT32(i) for i in range(LANES)]), left)
        with each(builder, heads) as head:
            found = _scores(builder, _row_of(builder, query, head, query_bytes), rows, dim)
            found = builder.select(is_key, found, constant(float("-inf")))
            store(builder, found, at(builder, _row_of(builder, scores, head, score_bytes), register, 4 * LANES))


def _scores(builder: Builder, query: Value, rows: Sequence[Value], dim: Value) -> Value:
    """Of one query with LANES rows."""
    size = LANES if most_sums() >= LANES else 4
    registers = [total for i in range(0, LANES, size) for total in _sums(builder, query, rows[i : i + size], dim)]
    for lanes in _FOLDS[-(len(registers).bit_length() - 1) :]:
        registers = _folded(builder, registers, lanes)
    return registers[0]


def _sums(builder: Builder, query: Value, rows: Sequence[Value], dim: Value) -> list[Value]:
    """Of one query with these rows, folded as far as is needed to keep few of them."""
    sums = variables(builder, len(rows))
    pairs = builder.sdiv(dim, INT64(_PAIRED))
    with each(builder, pairs) as pair:
        for part in parts():
            asked = load_pairs(builder, at(builder, query, pair, 2 * _PAIRED), part, 2)
            for total, row in zip(sums, rows, strict=True):
                key = load_pairs(builder, at(builder, row, pair, 2 * _PAIRED), part, 2)
                add_products(builder, total, key, asked)
    with builder.if_then(builder.icmp_signed("!=", builder.mul(pairs, INT64(_PAIRED)), dim)):
        for part in parts():
            asked = load_half(builder, at(builder, query, pairs, 2 * _PAIRED), part)
            for total, row in zip(sums, rows, strict=True):
                key = load_half(builder, at(builder, row, pairs, 2 * _PAIRED), part)
                add_products(builder, total, key, asked)
    registers = [builder.load(total) for total in sums]
    for lanes in _FOLDS[: (LANES // len(rows)).bit_length() - 1]:
        registers = _folded(builder, registers, lanes)
    return registers


def _folded(builder: Builder, registers: Sequence[Value], lanes: tuple[list[int], list[int]]) -> list[Value]:
    """Half as many, each the sum of two neighbours by these lanes of them."""
    pairs = zip(registers[::2], registers[1::2], strict=True)
    return [builder.fadd(*(shuffled(builder, *pair, some) for some in lanes)) for pair in pairs]


@instruction(6)
def weigh_scores(
    builder: Builder, scores: Value, score_bytes: Value, heads: Value, num_keys: Value, scaling: Value, shares: Value
) -> None:
    """Scores of each head to weights e^(scaling * (score - largest)), in place; to shares, float32 [heads], what makes
    one of their sum, and zero for a row that pads and sees no key. scaling: address of a float32."""
    registers = _registers(builder, num_keys)
    scale = repeated(builder, load(builder, FLOAT, scaling, 4))
    with each(builder, heads) as head:
        row = _row_of(builder, scores, head, score_bytes)
        most, mass = variables(builder, 2)
        builder.store(constant(float("-inf")), most)
        with each(builder, registers) as register:
            found, before = load(builder, FLOATS, at(builder, row, register, 4 * LANES), 4), builder.load(most)
            builder.store(builder.select(builder.fcmp_ordered(">", found, before), found, before), most)
        largest = repeated(builder, _reduced(builder, "fmax", builder.load(most)))
        with each(builder, registers) as register:
            place = at(builder, row, register, 4 * LANES)
            distance = builder.fsub(load(builder, FLOATS, place, 4), largest)
            weight = _exp(builder, builder.fmul(distance, scale))
            store(builder, weight, place)
            builder.store(builder.fadd(builder.load(mass), weight), mass)
        total = _reduced(builder, "fadd", FLOAT(0.0), builder.load(mass))
        share = builder.fdiv(FLOAT(1.0), total)
        share = builder.select(builder.fcmp_unordered("!=", total, FLOAT(0.0)), share, FLOAT(0.0))
        store(builder, share, at(builder, shares, head, 4))


def _reduced(builder: Builder, how: str, *arguments: Value) -> Value:
    """The lanes of the last argument to one number."""
    reduce = function(builder, f"llvm.vector.reduce.{how}.v16f32", FLOAT, *(argument.type for argument in arguments))
    return builder.call(reduce, arguments, fastmath=("reassoc",))


def _exp(builder: Builder, exponent: Value) -> Value:
    """As in `kernels`, of what is not above zero."""
    lowest = constant(-87.0)
    exponent = builder.select(builder.fcmp_ordered("<", exponent, lowest), lowest, exponent)
    floor = function(builder, "llvm.floor.v16f32", FLOATS, FLOATS)
    power = builder.call(floor, [fused(builder, exponent, constant(1.4426950408889634), constant(0.5))])
    rest = fused(builder, power, constant(-0.693359375), exponent)
    rest = fused(builder, power, constant(2.12194440e-4), rest)
    series = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fused(builder, series, rest, constant(factor))
    series = builder.fadd(fused(builder, series, builder.fmul(rest, rest), rest), constant(1.0))
    bits = builder.add(builder.fptosi(power, PAIRS), ir.Constant(PAIRS, [INT32(127)] * LANES))
    bits = builder.shl(bits, ir.Constant(PAIRS, [INT32(23)] * LANES))
    return builder.fmul(series, builder.bitcast(bits, FLOATS))


def _mix(
    builder: Builder, registers: int, heads: int, weights: Value, weight_bytes: Value, shares: Value, values: Value,
    value_bytes: Value, slots: Value, num_keys: Value, out: Value, out_bytes: Value,
) -> None:  # fmt: skip
    size = at_once(heads, registers)
    for start in range(0, registers, size):
        sums = variables(builder, heads * size)
        places = [INT64(2 * LANES * i) for i in range(start, start + size)]
        with each(builder, num_keys) as key:
            row = row_at(builder, values, value_bytes, slots, key)
            elements = [load_widened(builder, builder.add(row, place)) for place in places]
            for head in range(heads):
                weight = load(builder, FLOAT, at(builder, at(builder, weights, weight_bytes, head), key, 4), 4)
                for total, element in zip(sums[head * size :], elements, strict=False):
                    add_product(builder, total, repeated(builder, weight), element)
        for head in range(heads):
            share = repeated(builder, load(builder, FLOAT, builder.add(shares, INT64(4 * head)), 4))
            for place, total in zip(places, sums[head * size : (head + 1) * size], strict=True):
                address = builder.add(at(builder, out, out_bytes, head), place)
                store(builder, rounded(builder, builder.fmul(builder.load(total), share)), address)


@instructions(TILE_HEADS, 9)
def mix_values(builder: Builder, count: int, *arguments: Value) -> None:
    """For `count` heads that share values: share times the sum of weights, float32 [count, keys], times values, over
    the keys in order, to out bf16 [count, 4 * LANES]. values: bf16, each at a slot."""
    _mix(builder, 4, count, *arguments)


@instructions(TILE_HEADS, 9)
def mix_few_values(builder: Builder, count: int, *arguments: Value) -> None:
    """`mix_values` of LANES elements."""
    _mix(builder, 1, count, *arguments)


def _registers(builder: Builder, count: Value) -> Value:
    """That hold so many float32."""
    return builder.sdiv(builder.add(count, INT64(LANES - 1)), INT64(LANES))


def _smaller(builder: Builder, one: Value, other: Value) -> Value:
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def _row_of(builder: Builder, rows: Value, index: Value, row_bytes: Value) -> Value:
    return builder.add(rows, builder.mul(index, row_bytes))
