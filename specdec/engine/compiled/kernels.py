"""What a decoder layer computes besides its matrix products, compiled by numba when it is first called.

Stock layers take some sixty calls of torch for it, each over a few rows, and attention copies the KV that it reads.
Here each is one pass over the rows in float32, with the roundings of the stock layers between, and attention reads KV
where it lies. A row is computed alone and in an order that its own length gives: its bits depend on nothing beside it.

Arrays are numpy's: float32, or uint16 for the bits of bf16. Each kernel computes the rows from `start` to `end`. All
are in one file because numba's cache on the disk minds only changes of the file that a function is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

Elements = NDArray[Any]
"""float32, or uint16 for bf16."""
Ints = NDArray[np.int64]

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""What the compiler may do to sums and products. Not `nnan`: what is no number has to be told."""


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": _REORDERED}


def _compiled(function: _Kernel) -> _Kernel:
    try:
        return cast(_Kernel, njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no folder to write the cache to
        return cast(_Kernel, njit(**_OPTIONS)(function))


def _inlined(function: _Kernel) -> _Kernel:
    """A part of kernels. As a function of its own it would be reordered otherwise where it came from the cache than
    where it was just compiled, and two processes would differ in the last bit."""
    return cast(_Kernel, njit(inline="always", **_OPTIONS)(function))


def _widened(stored: Any) -> Any:
    """float32 of an element."""


def _narrowed(value: Any, like: Any) -> Any:
    """float32 as an element of the kind of `like`, rounded to the nearest even."""


@overload(_widened, inline="always", strict=False)
def _widened_of(stored: Any) -> Any:
    if stored is types.uint16:
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


@overload(_narrowed, inline="always", strict=False)
def _narrowed_of(value: Any, like: Any) -> Any:
    if like is types.uint16:

        def rounded(value: Any, like: Any) -> Any:
            bits = np.float32(value).view(np.uint32)
            return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

        return rounded
    return lambda value, like: np.float32(value)


@_inlined
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


@_inlined
def _normalize_row(hidden: Elements, weight: Elements, epsilon: float, normalized: Elements, row: int) -> None:
    width = hidden.shape[1]
    squares = np.float32(0)
    for i in range(width):
        value = _widened(hidden[row, i])
        squares += value * value
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
    for i in range(width):
        value = _widened(_narrowed(_widened(hidden[row, i]) * scale, hidden[row, i]))
        normalized[row, i] = _narrowed(value * _widened(weight[i]), hidden[row, i])


@_compiled
def normalize(hidden: Elements, weight: Elements, epsilon: float, normalized: Elements, start: int, end: int) -> None:
    """RMS norm of each row, [rows, width]."""
    for row in range(start, end):
        _normalize_row(hidden, weight, epsilon, normalized, row)


@_compiled
def add_and_normalize(
    hidden: Elements, added: Elements, weight: Elements, epsilon: float, normalized: Elements, start: int, end: int
) -> None:
    """Adds to the hidden state, [rows, width] each, then `normalize`."""
    for row in range(start, end):
        for i in range(hidden.shape[1]):
            hidden[row, i] = _narrowed(_widened(hidden[row, i]) + _widened(added[row, i]), hidden[row, i])
        _normalize_row(hidden, weight, epsilon, normalized, row)


@_compiled
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
    _, kv_heads, dim = keys.shape
    half = dim // 2
    kv_width = kv_heads * dim
    query_width = projected.shape[1] - 2 * kv_width
    rotated = np.empty(dim, np.float32)
    for row in range(start, end):
        slot = write_slots[row]
        for first in range(0, query_width + kv_width, dim):
            for i in range(half):
                low, high = projected[row, first + i], projected[row, first + half + i]
                turned = _widened(_narrowed(-_widened(high) * _widened(sine[row, i]), low))
                rotated[i] = _widened(_narrowed(_widened(low) * _widened(cosine[row, i]), low)) + turned
                turned = _widened(_narrowed(_widened(low) * _widened(sine[row, half + i]), low))
                straight = _widened(_narrowed(_widened(high) * _widened(cosine[row, half + i]), low))
                rotated[half + i] = straight + turned
            for i in range(dim):
                projected[row, first + i] = _narrowed(rotated[i], projected[row, first + i])
        for head in range(kv_heads):
            for i in range(dim):
                keys[slot, head, i] = projected[row, query_width + head * dim + i]
                values[slot, head, i] = projected[row, query_width + kv_width + head * dim + i]


@_inlined
def _score(query: Elements, keys: Elements, slots: Ints, scores: Elements) -> None:
    """scores [heads, keys] = Q K^T. query: [heads, dim], float32. The pool is read in the order it lies in: all heads
    of a key at once, and for two of them together that share it."""
    heads, dim = query.shape
    fold = heads // keys.shape[1]
    for key in range(len(slots)):
        slot = slots[key]
        for kv_head in range(keys.shape[1]):
            head, end = kv_head * fold, (kv_head + 1) * fold
            while head + 1 < end:
                first = second = np.float32(0)
                for i in range(dim):
                    element = _widened(keys[slot, kv_head, i])
                    first += query[head, i] * element
                    second += query[head + 1, i] * element
                scores[head, key], scores[head + 1, key] = first, second
                head += 2
            if head < end:
                first = np.float32(0)
                for i in range(dim):
                    first += query[head, i] * _widened(keys[slot, kv_head, i])
                scores[head, key] = first


@_inlined
def _weigh(scores: Elements, count: int) -> None:
    """Softmax of the first `count` scores of each head, [heads, any], in place."""
    for head in range(len(scores)):
        largest = np.float32(-np.inf)
        for key in range(count):
            largest = scores[head, key] if scores[head, key] > largest else largest
        mass = np.float32(0)
        for key in range(count):
            weight = _exp(scores[head, key] - largest)
            scores[head, key] = weight
            mass += weight
        share = np.float32(1) / mass
        for key in range(count):
            scores[head, key] *= share


@_inlined
def _mix(weights: Elements, values: Elements, slots: Ints, mixed: Elements) -> None:
    """mixed [heads, dim], float32, = weights [heads, any] V, four keys at a time."""
    heads, dim = mixed.shape
    fold, count = heads // values.shape[1], len(slots)
    mixed[:] = 0
    for key in range(0, count - count % 4, 4):
        a, b, c, d = slots[key], slots[key + 1], slots[key + 2], slots[key + 3]
        for head in range(heads):
            kv_head = head // fold
            weight_a, weight_b = weights[head, key], weights[head, key + 1]
            weight_c, weight_d = weights[head, key + 2], weights[head, key + 3]
            for i in range(dim):
                mixed[head, i] += (
                    weight_a * _widened(values[a, kv_head, i])
                    + weight_b * _widened(values[b, kv_head, i])
                    + weight_c * _widened(values[c, kv_head, i])
                    + weight_d * _widened(values[d, kv_head, i])
                )
    for key in range(count - count % 4, count):
        slot = slots[key]
        for head in range(heads):
            weight = weights[head, key]
            for i in range(dim):
                mixed[head, i] += weight * _widened(values[slot, head // fold, i])


@_compiled
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
    dim = keys.shape[2]
    heads = attended.shape[1] // dim
    longest = 0
    for row in range(start, end):
        longest = max(longest, num_keys[row])
    scores = np.empty((heads, longest), np.float32)
    query = np.empty((heads, dim), np.float32)
    mixed = np.empty((heads, dim), np.float32)
    for row in range(start, end):
        slots = key_slots[first_keys[row] : first_keys[row] + num_keys[row]]
        for head in range(heads):
            for i in range(dim):
                query[head, i] = _widened(projected[row, head * dim + i]) * np.float32(scaling)
        _score(query, keys, slots, scores)
        _weigh(scores, len(slots))
        _mix(scores, values, slots, mixed)
        for head in range(heads):
            for i in range(dim):
                attended[row, head * dim + i] = _narrowed(mixed[head, i], attended[row, i])


@_compiled
def gate(gates_and_ups: Elements, gated: Elements, start: int, end: int) -> None:
    """silu(gate) * up, [rows, 2 * width] -> [rows, width]."""
    width = gated.shape[1]
    for row in range(start, end):
        for i in range(width):
            gate = _widened(gates_and_ups[row, i])
            opened = _narrowed(gate / (np.float32(1) + _exp(-gate)), gated[row, i])
            gated[row, i] = _narrowed(_widened(opened) * _widened(gates_and_ups[row, width + i]), gated[row, i])
