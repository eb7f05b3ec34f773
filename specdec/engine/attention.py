"""Attention over paged KV: the function that transformers calls, and the seam behind which the arithmetic is done.

transformers' models call `outrider_paged` once per attention layer. It finds the forward it belongs to in a context
variable, writes the new K and V into the pool and computes all tiles of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional

from specdec.engine.layout import Layout, TileGroup

ATTENTION_NAME = "outrider_paged"

TileAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, "float | None"],
    torch.Tensor,
]
"""(query [tiles, kv_heads, tile_size * group, dim], key [tiles, kv_heads, keys, dim], value likewise, additive mask
[tiles, 1, tile_size * group, keys], scaling, softcap) -> shape of query. The query heads of a KV group
are folded into the query axis. Each tile's bits must depend on that tile alone."""


class UnsupportedAttention(Exception):
    """A layer asked for something that paged attention does not compute."""


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """torch's fused kernel; it knows no soft cap, so layers with one take the reference."""
    if softcap is not None:
        return reference(query, key, value, mask, scaling, softcap)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """softmax(Q K^T * scaling) V, one tile at a time, in float32: slow, and plain to read."""
    outputs = []
    for q, k, v, m in zip(query.float(), key.float(), value.float(), mask.float(), strict=True):
        scores = q @ k.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        outputs.append(torch.softmax(scores + m, dim=-1) @ v)
    return torch.stack(outputs).to(query.dtype)


IMPLEMENTATIONS: dict[str, TileAttention] = {"sdpa": sdpa, "reference": reference}


@dataclass(slots=True)
class PagedForward:
    """One forward pass as its attention layers see it."""

    layout: Layout
    kv: torch.Tensor  # [layers, 2, slots, kv_heads, head_dim]; K then V
    attend: TileAttention
    layers_called: list[int] = field(default_factory=list)
    _masks: dict[tuple[int, int | None, int], torch.Tensor] = field(default_factory=dict)

    def run_layer(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, T, dim]
        key: torch.Tensor,  # [1, kv_heads, T, dim]
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Output of all rows, [1, T, heads, dim]."""
        self.layers_called.append(layer)
        layout = self.layout
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        keys.index_copy_(0, layout.write_slots, key[0].transpose(0, 1))
        values.index_copy_(0, layout.write_slots, value[0].transpose(0, 1))
        rows = query[0].transpose(0, 1)  # [T, heads, dim]
        fold = rows.shape[1] // keys.shape[1]
        tiles = [
            self._run_group(index, group, rows, keys, values, scaling, window, softcap, fold)
            for index, group in enumerate(layout.groups)
        ]
        places = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return places.index_select(0, layout.place_of_row)[None]

    def _run_group(
        self,
        index: int,
        group: TileGroup,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        fold: int,
    ) -> torch.Tensor:
        """Output of the group's places, [tiles * tile_size, heads, dim]."""
        (tiles, tile_size), (_, kv_heads, dim) = group.positions.shape, keys.shape
        query = rows.index_select(0, group.rows).view(tiles, tile_size, kv_heads, fold, dim)
        query = query.transpose(1, 2).reshape(tiles, kv_heads, tile_size * fold, dim)
        output = self.attend(
            query,
            _gather(keys, group, tiles),
            _gather(values, group, tiles),
            self._mask(index, group, window, fold, rows.dtype),
            scaling,
            softcap,
        )
        output = output.reshape(tiles, kv_heads, tile_size, fold, dim).transpose(1, 2)
        return output.reshape(tiles * tile_size, kv_heads * fold, dim)

    def _mask(self, index: int, group: TileGroup, window: int | None, fold: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive [tiles, 1, tile_size * fold, keys]: a row sees keys up to itself, at most `window` of them."""
        mask = self._masks.get((index, window, fold))
        if mask is None:
            position = group.positions.repeat_interleave(fold, dim=1)[:, None, :, None]
            key = torch.arange(group.key_slots.shape[1], device=position.device)
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=position.device).masked_fill_(~seen, -torch.inf)
            self._masks[index, window, fold] = mask
        return mask


def _gather(pool: torch.Tensor, group: TileGroup, tiles: int) -> torch.Tensor:
    """Keys or values of each tile, [tiles, kv_heads, keys, dim]."""
    batch, keys = group.key_slots.shape
    gathered = pool.index_select(0, group.key_slots.view(-1)).view(batch, keys, *pool.shape[1:]).transpose(1, 2)
    return gathered.expand(tiles, -1, -1, -1) if group.shares_keys else gathered


class Forward(Protocol):
    """A forward as its layers see it: `PagedForward`, or `ChainLayers` over block tables."""

    def run_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor: ...


_current: ContextVar[Forward] = ContextVar("outrider_paged_forward")


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Within this context the attention layers of this thread belong to `forward`."""
    token = _current.set(forward)
    try:
        yield
    finally:
        _current.reset(token)


IGNORED_ARGUMENTS = frozenset(
    {"dropout", "position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits", "logits_to_keep"}
)
"""Arguments of a layer's call that change nothing in a causal forward without dropout."""


def outrider_paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls per attention layer: (output [1, T, heads, dim], no weights)."""
    unknown = [name for name, given in kwargs.items() if given is not None and name not in IGNORED_ARGUMENTS]
    if unknown or attention_mask is not None:
        raise UnsupportedAttention(f"layer {module.layer_idx} asks for {', '.join(unknown) or 'a mask'}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _current.get().run_layer(module.layer_idx, query, key, value, scaling, sliding_window, softcap)
    return output, None


def register() -> None:
    """Makes the name known to transformers; models opt in by `set_attn_implementation`.

    No mask function of that name is registered, so that models build no mask and pass None.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, outrider_paged)
