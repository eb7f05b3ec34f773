"""What a decoder layer computes besides its matrix products, compiled by numba when it is first called.

Stock layers take some sixty calls of torch for it, each over a few rows, and attention copies the KV that it reads.
Here each is one pass over the rows in float32, with the roundings of the stock layers between, and attention reads KV
where it lies. A row is computed alone and in an order that its own length gives: its bits depend on nothing beside it.

Arrays are numpy's: float32, or uint16 for the bits of bf16. Each kernel computes the rows from `start` to `end`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from specdec.engine.compiled.compiling import compiled, inlined

Elements = NDArray[Any]
"""float32, or uint16 for bf16."""
Ints = NDArray[np.int64]


def widened(stored: Any) -> Any:
    """float32 of an element."""


def narrowed(value: Any, like: Any) -> Any:
    """float32 as an element of the kind of `like`, rounded to the nearest even."""


@overload(widened, inline="always", strict=False)
def _widened_of(stored: Any) -> Any:
    if stored is types.uint16:
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


@overload(narrowed, inline="always", strict=False)
def _narrowed_of(value: Any, like: Any) -> Any:
    if like is types.uint16:

        def rounded(value: Any, like: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

        return rounded
    return lambda value, like: np.float32(value)


def stored_bf16(bits: Any, like: Any) -> Any:
    """The bits of a bf16 as an element of the kind of `like`."""


@overload(stored_bf16, inline="always", strict=False)
def _stored_bf16_of(bits: Any, like: Any) -> Any:
    if like is types.uint16:
        return lambda bits, like: bits
    return lambda bits, like: widened(bits)


@inlined
def _exp(x: Any) -> Any:
    """e^x in float32, within two units of the last place, in arithmetic that can be done to many at once: a power of
    two times a polynomial on [-ln 2 / 2, ln 2 / 2] (S. Moshier, Cephes)."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    power = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = x - power * np.float32(0.693359375)
    rest = rest + power * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1)
    return series * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def normalize_row(hidden: Elements, weight: Elements, epsilon: float, normalized: Elements, row: int) -> None:
    width = hidden.shape[1]
    squares = np.float32(0)
    for i in range(width):
        value = widened(hidden[row, i])
        squares += value * value
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
    for i in range(width):
        value = widened(narrowed(widened(hidden[row, i]) * scale, hidden[row, i]))
        normalized[row, i] = narrowed(value * widened(weight[i]), hidden[row, i])


@inlined
def add_and_normalize_row(
    hidden: Elements, added: Elements, weight: Elements, epsilon: float, normalized: Elements, row: int
) -> None:
    for i in range(hidden.shape[1]):
        hidden[row, i] = narrowed(widened(hidden[row, i]) + widened(added[row, i]), hidden[row, i])
    normalize_row(hidden, weight, epsilon, normalized, row)


@compiled
def normalize(hidden: Elements, weight: Elements, epsilon: float, normalized: Elements, start: int, end: int) -> None:
    """RMS norm of each row, [rows, width]."""
    for row in range(start, end):
        normalize_row(hidden, weight, epsilon, normalized, row)


@compiled
def add_and_normalize(
    hidden: Elements, added: Elements, weight: Elements, epsilon: float, normalized: Elements, start: int, end: int
) -> None:
    """Adds to the hidden state, [rows, width] each, then `normalize`."""
    for row in range(start, end):
        add_and_normalize_row(hidden, added, weight, epsilon, normalized, row)


@inlined
def rotate_row(projected: Elements, cosine: Elements, sine: Elements, kv_heads: int, row: int) -> None:
    """See `rotate_and_store`."""
    dim = cosine.shape[1]
    half = dim // 2
    for first in range(0, projected.shape[1] - kv_heads * dim, dim):
        for i in range(half):
            low, high = projected[row, first + i], projected[row, first + half + i]
            turned = widened(narrowed(-widened(high) * widened(sine[row, i]), low))
            straight = widened(narrowed(widened(low) * widened(cosine[row, i]), low))
            projected[row, first + i] = narrowed(straight + turned, low)
            turned = widened(narrowed(widened(low) * widened(sine[row, half + i]), low))
            straight = widened(narrowed(widened(high) * widened(cosine[row, half + i]), low))
            projected[row, first + half + i] = narrowed(straight + turned, low)


@inlined
def store_row(projected: Elements, keys: Elements, values: Elements, slot: int, row: int) -> None:
    _, kv_heads, dim = keys.shape
    first = projected.shape[1] - 2 * kv_heads * dim
    for head in range(kv_heads):
        for i in range(dim):
            keys[slot, head, i] = projected[row, first + head * dim + i]
            values[slot, head, i] = projected[row, first + (kv_heads + head) * dim + i]


@compiled
def rotate_and_store(
    projected: Elements,  # [rows, (heads + 2 kv_heads) * dim]: query, key, value
    cosine: Elements,  # [rows, dim]
    sine: Elements,
    keys: Elements,  # [slots, kv_heads, dim]
    values: Elements,
    write_slots: Ints,  # [rows]
    start: int,
    end: int,
) -> None:
    """Rotates queries in place by their positions, and writes rotated keys and the values to the pool."""
    for row in range(start, end):
        rotate_row(projected, cosine, sine, keys.shape[1], row)
        store_row(projected, keys, values, write_slots[row], row)


@inlined
def _score(query: Elements, keys: Elements, slots: Ints, kv_head: int, scores: Elements) -> None:
    """scores [heads, keys] = Q K^T of the heads that share `kv_head`, two of them together. query: [heads, dim]."""
    fold, dim = query.shape
    for key in range(len(slots)):
        slot = slots[key]
        head = 0
        while head + 1 < fold:
            first = second = np.float32(0)
            for i in range(dim):
                element = widened(keys[slot, kv_head, i])
                first += query[head, i] * element
                second += query[head + 1, i] * element
            scores[head, key], scores[head + 1, key] = first, second
            head += 2
        if head < fold:
            first = np.float32(0)
            for i in range(dim):
                first += query[head, i] * widened(keys[slot, kv_head, i])
            scores[head, key] = first


@inlined
def _ordered(bits: Any) -> Any:
    """The bits of float32 as integers in the same order, and back: the compiler looks for the largest of many integers
    at once. What is no number is larger than all or, with a sign, is ignored."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def weigh(scores: Elements, count: int) -> None:
    """Softmax of the first `count` scores of each head, [heads, any], in place."""
    for head in range(len(scores)):
        highest = _ordered(np.float32(-np.inf).view(np.int32))
        for key in range(count):
            highest = max(highest, _ordered(np.float32(scores[head, key]).view(np.int32)))
        largest = np.int32(_ordered(highest)).view(np.float32)
        mass = np.float32(0)
        for key in range(count):
            weight = _exp(scores[head, key] - largest)
            scores[head, key] = weight
            mass += weight
        share = np.float32(1) / mass
        for key in range(count):
            scores[head, key] *= share


@inlined
def _mix(weights: Elements, values: Elements, slots: Ints, kv_head: int, mixed: Elements) -> None:
    """mixed [heads, dim], float32, = weights [heads, any] V, four keys at a time."""
    fold, dim = mixed.shape
    count = len(slots)
    mixed[:] = 0
    for key in range(0, count - count % 4, 4):
        a, b, c, d = slots[key], slots[key + 1], slots[key + 2], slots[key + 3]
        for head in range(fold):
            weight_a, weight_b = weights[head, key], weights[head, key + 1]
            weight_c, weight_d = weights[head, key + 2], weights[head, key + 3]
            for i in range(dim):
                mixed[head, i] += (
                    weight_a * widened(values[a, kv_head, i])
                    + weight_b * widened(values[b, kv_head, i])
                    + weight_c * widened(values[c, kv_head, i])
                    + weight_d * widened(values[d, kv_head, i])
                )
    for key in range(count - count % 4, count):
        for head in range(fold):
            weight = weights[head, key]
            for i in range(dim):
                mixed[head, i] += weight * widened(values[slots[key], kv_head, i])


@inlined
def attend_heads(
    projected: Elements,
    keys: Elements,
    values: Elements,
    slots: Ints,
    scaling: float,
    query: Elements,
    scores: Elements,
    mixed: Elements,
    attended: Elements,
    row: int,
    kv_head: int,
) -> None:
    """Attention of one row for the heads that share `kv_head`. query, mixed: float32 [heads of one, dim], and scores:
    [heads of one, keys or more], for the work in between."""
    fold, dim = query.shape
    for head in range(fold):
        for i in range(dim):
            query[head, i] = widened(projected[row, (kv_head * fold + head) * dim + i]) * np.float32(scaling)
    _score(query, keys, slots, kv_head, scores)
    weigh(scores, len(slots))
    _mix(scores, values, slots, kv_head, mixed)
    for head in range(fold):
        for i in range(dim):
            attended[row, (kv_head * fold + head) * dim + i] = narrowed(mixed[head, i], attended[row, i])


@compiled
def attend(
    projected: Elements,  # [rows, (heads + 2 kv_heads) * dim]: the query first, rotated
    keys: Elements,  # [slots, kv_heads, dim]
    values: Elements,
    key_slots: Ints,  # [any]
    first_keys: Ints,  # [rows]
    num_keys: Ints,  # [rows]
    scaling: float,
    attended: Elements,  # [rows, heads * dim]
    start: int,
    end: int,
) -> None:
    """softmax(Q K^T * scaling) V of each row over the keys in `key_slots` from `first_keys[row]` on."""
    _, kv_heads, dim = keys.shape
    fold = attended.shape[1] // dim // kv_heads
    longest = 0
    for row in range(start, end):
        longest = max(longest, num_keys[row])
    scores = np.empty((fold, longest), np.float32)
    query, mixed = np.empty((fold, dim), np.float32), np.empty((fold, dim), np.float32)
    for row in range(start, end):
        slots = key_slots[first_keys[row] : first_keys[row] + num_keys[row]]
        for kv_head in range(kv_heads):
            attend_heads(
                projected, keys, values, slots, scaling, query, scores, mixed, attended, row, kv_head
            )  # fmt: skip


@inlined
def gate_row(gates_and_ups: Elements, gated: Elements, row: int) -> None:
    width = gated.shape[1]
    for i in range(width):
        gate = widened(gates_and_ups[row, i])
        opened = narrowed(gate / (np.float32(1) + _exp(-gate)), gated[row, i])
        gated[row, i] = narrowed(widened(opened) * widened(gates_and_ups[row, width + i]), gated[row, i])


@compiled
def gate(gates_and_ups: Elements, gated: Elements, start: int, end: int) -> None:
    """silu(gate) * up, [rows, 2 * width] -> [rows, width]."""
    for row in range(start, end):
        gate_row(gates_and_ups, gated, row)
