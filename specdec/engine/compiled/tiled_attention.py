"""Attention of one row over bf16 keys and values where they lie, in registers. For heads of a multiple of `LANES`."""

from __future__ import annotations

import numpy as np

from specdec.engine.compiled.compiling import inlined
from specdec.engine.compiled.kernels import Elements, Ints, narrowed, weigh, widened
from specdec.engine.compiled.products import Floats
from specdec.engine.compiled.vectors import LANES, TILE_HEADS, mix_few_values, mix_values, score_keys


@inlined
def attend_heads(
    projected: Elements,  # [rows, (heads + 2 kv_heads) * dim]: the query first, rotated
    keys: Elements,  # [slots, kv_heads, dim]
    values: Elements,
    slots: Ints,  # [keys]: of those that the row sees
    scaling: float,
    query: Floats,  # [heads of a KV head, dim], for the work in between, as are the next two
    scores: Floats,  # [heads of a KV head, keys or more]
    mixed: Floats,  # [heads of a KV head, dim]
    attended: Elements,  # [rows, heads * dim]
    row: int,
    kv_head: int,
) -> None:
    """softmax(Q K^T * scaling) V of one row for the heads that share `kv_head`."""
    heads, dim = query.shape
    count, first = len(slots), kv_head * heads * dim
    for head in range(heads):
        for i in range(dim):
            query[head, i] = widened(projected[row, first + head * dim + i]) * np.float32(scaling)
    key_bytes, offset = keys.shape[1] * dim * 2, kv_head * dim * 2
    row_bytes, score_bytes = dim * 4, scores.shape[1] * 4
    for head in range(0, heads, TILE_HEADS):
        asked, scored = query.ctypes.data + head * row_bytes, scores.ctypes.data + head * score_bytes
        score_keys(
            min(TILE_HEADS, heads - head),
            (
                asked, row_bytes, keys.ctypes.data + offset, key_bytes, slots.ctypes.data, count, dim // LANES,
                scored, score_bytes,
            ),
        )  # fmt: skip
    weigh(scores, count)
    for head in range(0, heads, TILE_HEADS):
        tile, scored = min(TILE_HEADS, heads - head), scores.ctypes.data + head * score_bytes
        for i in range(0, dim, LANES if dim % (4 * LANES) else 4 * LANES):
            source, target = values.ctypes.data + offset + i * 2, mixed.ctypes.data + head * row_bytes + i * 4
            arguments = (scored, score_bytes, source, key_bytes, slots.ctypes.data, count, target, row_bytes)
            if dim % (4 * LANES):
                mix_few_values(tile, arguments)
            else:
                mix_values(tile, arguments)
    for head in range(heads):
        for i in range(dim):
            attended[row, first + head * dim + i] = narrowed(mixed[head, i], attended[row, 0])
