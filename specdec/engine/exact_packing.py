"""The cheapest packing that changes no bit, measured on the model itself when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec.engine.attention import TileAttention
from specdec.engine.layout import LARGE_KEYS, SMALL_KEYS
from specdec.engine.model import Segment
from specdec.engine.numeric_noise import PREFIX_LENGTH, ROWS, fed_logits, opened
from specdec.engine.packing import ALONE, PADDED, SINGLE, TILE, Packing
from specdec.engine.runner import KvShape, ModelRunner, ranks_of

COMPARED_ROWS = 40
"""In the forward that others of fewer rows must equal."""
COMPARED_COUNTS = (1, 5, 6, 7, 13, 18, 31)
"""Every way to be no multiple of 4, with few rows and with many."""
_COMPARED_KEYS = (*range(SMALL_KEYS, LARGE_KEYS + 1, SMALL_KEYS), 2 * LARGE_KEYS, 5 * LARGE_KEYS)
"""Whose attention is compared in small tiles and whole ones."""


def exact_packing(runner: ModelRunner, token_ids: Sequence[int]) -> Packing:
    """The cheapest packing under which, on this model and machine, a row has the same bits in any forward.

    On CUDA row counts come from the graphs, and ranks that share a model must agree on them: `PADDED` there. Raises
    ValueError if the KV memory does not hold it. token_ids: at least `COMPARED_ROWS`; the runner's sequences must all
    be closed.
    """
    if runner.model.device.type != "cpu" or ranks_of(runner.model) > 1:
        return PADDED
    before = runner.packing
    try:
        runner.packing = packing = ALONE if runner.is_tiled else SINGLE
        whole = _from_start(runner, token_ids[:COMPARED_ROWS])
        if not all(torch.equal(_from_start(runner, token_ids[:count]), whole[:count]) for count in COMPARED_COUNTS):
            runner.packing = packing = PADDED
            whole = _from_start(runner, token_ids[:COMPARED_ROWS])
        if runner.is_compiled:  # no tiles
            return packing
        runner.packing = replace(packing, few_tile=smallest_tile(runner))
        end = PREFIX_LENGTH + ROWS
        steps = [tuple(token_ids[:PREFIX_LENGTH]), *((token_id,) for token_id in token_ids[PREFIX_LENGTH:end])]
        same = torch.equal(fed_logits(runner, steps), whole[PREFIX_LENGTH:end])
        return runner.packing if same else packing
    finally:
        runner.packing = before


def smallest_tile(runner: ModelRunner) -> int:
    """Positions of the smallest tile in which attention of this model's shape gives every row the bits that it has in
    one of `TILE`, over any number of keys."""
    config = runner.model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return TILE
    shape = KvShape.of(config, runner.model.dtype)
    fold = config.num_attention_heads // shape.kv_heads
    generator = torch.Generator().manual_seed(0)
    sizes = [size for size in (1, 2, 4) if size < TILE]
    for keys in _COMPARED_KEYS:
        tile = _Tile.drawn(keys, fold, shape, generator)
        expected = tile.attended(runner.attend, TILE)
        sizes = [size for size in sizes if torch.equal(tile.attended(runner.attend, size), expected)]
    return min(sizes, default=TILE)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Attention of the last `TILE` positions of `keys`, of random content. query: [kv_heads, TILE * fold, dim]; key,
    value: [keys, kv_heads, dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    fold: int

    @classmethod
    def drawn(cls, keys: int, fold: int, shape: KvShape, generator: torch.Generator) -> _Tile:
        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(shape.dtype)

        heads, dim = shape.kv_heads, shape.head_dim
        return cls(draw(heads, TILE * fold, dim), draw(keys, heads, dim), draw(keys, heads, dim), fold)

    def attended(self, attend: TileAttention, size: int) -> torch.Tensor:
        """In tiles of `size` positions, each with a gather of its own, as the engine has them; like `query`."""
        heads, rows, dim = self.query.shape
        count, keys = TILE // size, len(self.key)
        query = self.query.view(heads, count, size * self.fold, dim).transpose(0, 1).contiguous()
        key, value = (part.repeat(count, 1, 1, 1).transpose(1, 2) for part in (self.key, self.value))
        position = torch.arange(keys - TILE, keys).repeat_interleave(self.fold)
        unseen = torch.arange(keys) > position[:, None]
        mask = torch.zeros(rows, keys, dtype=query.dtype).masked_fill_(unseen, -torch.inf)
        output = attend(query, key, value, mask.view(count, 1, -1, keys), dim**-0.5, None)
        return output.transpose(0, 1).reshape(heads, rows, dim)


def _from_start(runner: ModelRunner, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of one forward over a sequence's first tokens, [len(token_ids), vocab]."""
    with opened(runner, ("row",)):
        if not runner.reserve("row", len(token_ids)):
            raise ValueError("the KV memory does not hold the self-test: raise kv_memory")
        return runner.forward([Segment("row", tuple(token_ids), None, len(token_ids))])[0]
