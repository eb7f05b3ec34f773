"""Attention over block tables: torch's `varlen_attn`, and the same in plain torch to test it by.

What was found by reading torch 2.13 and its issues, each of which the probe or the call below stands for:

- The built-in kernel (FlashAttention 2) splits long keys among thread blocks, and over block tables it then leaves rows
  unwritten (pytorch#194167). `num_splits=1` never splits; a row also no longer depends on its neighbours.
- With one row per entry and grouped heads it takes row i to be entry i's, so no row may be uncovered.
- It wants `cu_seq_k` although a block table makes it meaningless; FlashAttention 3, if activated, refuses it.
- Its pages are multiples of 256 tokens, its dtypes bf16 and fp16, its devices sm80 and newer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine.page_tables import PageTables

log = logging.getLogger(__name__)

PROBE_TOLERANCE = 0.03
"""Difference from plain torch at most; the values are about 1, and bf16 rounds them by up to 0.004."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """varlen_attn, or what is called like it. with_key_starts: whether it is given `cu_seq_k`."""

    function: Callable[..., Any]
    with_key_starts: bool

    def __call__(
        self,
        query: torch.Tensor,  # [rows, heads, dim]
        keys: torch.Tensor,  # [slots, kv_heads, dim]
        values: torch.Tensor,
        tables: PageTables,
        page_size: int,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of each entry's rows, which are its last keys; [rows, heads, dim]. window: keys that a row
        sees at most, its own included."""
        paged = (-1, page_size, *keys.shape[1:])
        output: torch.Tensor = self.function(
            query,
            keys.view(paged),
            values.view(paged),
            tables.query_starts,
            tables.key_starts if self.with_key_starts else None,
            tables.most_rows,
            tables.most_keys,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[1],
            seqused_k=tables.key_lengths,
            block_table=tables.pages,
            num_splits=1,
        )
        return output


def varlen_reference(
    query: torch.Tensor,  # [rows, heads, dim]
    key: torch.Tensor,  # [pages, page_size, kv_heads, dim]
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,  # [entries + 1]
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor,  # [entries]
    block_table: torch.Tensor,  # [entries, pages]
    num_splits: int | None = None,
) -> torch.Tensor:
    """What `varlen_attn` is documented to compute over a block table, entry by entry in float32. The mask is aligned at
    the bottom right: an entry's last row sees its last key. Raises ValueError for what the kernels would refuse."""
    if any(table.dtype != torch.int32 for table in (cu_seq_q, seqused_k, block_table)):
        raise ValueError("the tables must be int32")
    if len(block_table) != len(seqused_k) or len(cu_seq_q) != len(seqused_k) + 1:
        raise ValueError("the tables must have one row per entry")
    if query.shape[1] % key.shape[2] or (query.shape[1] != key.shape[2] and not enable_gqa):
        raise ValueError("more query heads than KV heads need enable_gqa")
    if max_q == 1 and len(query) != len(seqused_k):
        raise ValueError("with one row per entry every row must be an entry's")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output = torch.zeros_like(query)
    bounds = cu_seq_q.tolist()
    for first, end, length, pages in zip(bounds[:-1], bounds[1:], seqused_k.tolist(), block_table, strict=True):
        if end - first > max_q or length > max_k:
            raise ValueError("an entry is longer than max_q or max_k says")
        k, v = (pool[pages.long()].flatten(0, 1)[:length].float() for pool in (key, value))
        output[first:end] = _attend(query[first:end].float(), k, v, scale, window_size).to(query.dtype)
    return output


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window_size: tuple[int, int]
) -> torch.Tensor:
    """query [rows, heads, dim], key and value [keys, kv_heads, dim] -> [rows, heads, dim]."""
    fold = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(fold, dim=1), value.repeat_interleave(fold, dim=1)
    scores = torch.einsum("rhd,khd->hrk", query, key) * scale
    place = torch.arange(len(query), device=query.device)[:, None] + len(key) - len(query)
    distance = place - torch.arange(len(key), device=query.device)  # how far the key lies behind the row
    left, right = window_size
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hrk,khd->rhd", weights, value)


REFERENCE = PagedAttention(varlen_reference, with_key_starts=True)


@dataclass(frozen=True, slots=True)
class HeadShape:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


def find_varlen(device: torch.device, shape: HeadShape, page_size: int) -> PagedAttention | None:
    """`varlen_attn` in a form that computes the right thing on this device; None if none does, and the log says why."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        log.info("this build of torch has no varlen_attn: attention gathers")
        return None
    reasons: list[str] = []
    for with_key_starts in (True, False):
        attention = PagedAttention(varlen_attn, with_key_starts)
        reason = reason_against(attention, device, shape, page_size)
        if reason is None:
            return attention
        reasons.append(reason)
    log.info("varlen_attn over block tables does not work on %s (%s): attention gathers", device, "; ".join(reasons))
    return None


@torch.inference_mode()
def reason_against(attention: PagedAttention, device: torch.device, shape: HeadShape, page_size: int) -> str | None:
    """Tries several entries over long, scattered pages, with and without a window, one row per entry and more; None if
    all agree with plain torch."""
    generator = torch.Generator().manual_seed(0)
    pool = (9 * page_size, shape.kv_heads, shape.dim)
    keys, values = (torch.randn(pool, generator=generator).to(device, shape.dtype) for _ in range(2))
    for rows, window in ((1, None), (5, None), (5, 7)):
        query = torch.randn(3 * rows, shape.heads, shape.dim, generator=generator).to(device, shape.dtype)
        tables = _probe_tables(rows, page_size, device)
        call = (query, keys, values, tables, page_size, shape.dim**-0.5, window)
        try:
            found = attention(*call)
            error = (found.float() - REFERENCE(*call).float()).abs().max().item()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as refusal:
            return str(refusal).strip().partition("\n")[0]
        if not error <= PROBE_TOLERANCE:
            return f"off by {error:.2g}"
    return None


def _probe_tables(rows: int, page_size: int, device: torch.device) -> PageTables:
    """Three entries of `rows` rows each over pages in no order; the first is as long as the table."""
    lengths = torch.tensor([4 * page_size, page_size + rows, rows], dtype=torch.int32, device=device)
    starts = torch.arange(4, dtype=torch.int32, device=device) * rows
    pages = torch.tensor([[7, 2, 5, 3], [4, 8, 0, 0], [6, 0, 0, 0]], dtype=torch.int32, device=device)
    key_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return PageTables(starts, key_starts, lengths, pages, rows, 4 * page_size)
