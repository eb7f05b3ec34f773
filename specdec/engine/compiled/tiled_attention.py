"""Attention of one row over bf16 keys and values where they lie, in registers. For heads of a multiple of `LANES`."""

from __future__ import annotations

from specdec.engine.compiled.attention_vectors import (
    TILE_HEADS,
    mix_few_values,
    mix_values,
    rotate_heads,
    score_keys,
    weigh_scores,
)
from specdec.engine.compiled.compiling import inlined
from specdec.engine.compiled.kernels import Elements, Ints, rotate_row
from specdec.engine.compiled.products import Floats
from specdec.engine.compiled.vectors import LANES


@inlined
def rotate(projected: Elements, cosine: Elements, sine: Elements, kv_heads: int, row: int) -> None:
    """Queries and keys of one row, in place. projected: [rows, (heads + 2 kv_heads) * dim]; cosine, sine:
    [rows, dim]."""
    dim = cosine.shape[1]
    if dim % (2 * LANES):
        rotate_row(projected, cosine, sine, kv_heads, row)
    else:
        heads = projected.shape[1] // dim - kv_heads
        rotate_heads((projected[row].ctypes.data, heads, dim, cosine[row].ctypes.data, sine[row].ctypes.data))


@inlined
def attend_heads(
    projected: Elements,  # [rows, (heads + 2 kv_heads) * dim]: the query first, rotated
    keys: Elements,  # [slots, kv_heads, dim]
    values: Elements,
    slots: Ints,  # [keys]: of those that the row sees
    scaling: Floats,  # [1]
    scores: Floats,  # [heads of a KV head, keys up to a multiple of LANES, or more], for the work in between
    shares: Floats,  # [heads of a KV head], the same
    attended: Elements,  # [rows, heads * dim]
    row: int,
    kv_head: int,
) -> None:
    """softmax(Q K^T * scaling) V of one row for the heads that share `kv_head`."""
    dim, heads, count = keys.shape[2], len(shares), len(slots)
    head_bytes, kv_bytes, score_bytes = dim * 2, keys.shape[1] * dim * 2, scores.shape[1] * 4
    first = kv_head * heads * head_bytes
    asked, answered = projected[row].ctypes.data + first, attended[row].ctypes.data + first
    key, value = keys.ctypes.data + kv_head * head_bytes, values.ctypes.data + kv_head * head_bytes
    slot, scored, share = slots.ctypes.data, scores.ctypes.data, shares.ctypes.data
    score_keys((asked, head_bytes, heads, dim, key, value, kv_bytes, slot, count, scored, score_bytes))
    weigh_scores((scored, score_bytes, heads, count, scaling.ctypes.data, share))
    width = LANES if dim % (4 * LANES) else 4 * LANES
    for head in range(0, heads, TILE_HEADS):
        weights, shared, target = scored + head * score_bytes, share + head * 4, answered + head * head_bytes
        for i in range(0, head_bytes, 2 * width):
            arguments = (weights, score_bytes, shared, value + i, kv_bytes, slot, count, target + i, head_bytes)
            if width == LANES:
                mix_few_values(min(TILE_HEADS, heads - head), arguments)
            else:
                mix_values(min(TILE_HEADS, heads - head), arguments)
