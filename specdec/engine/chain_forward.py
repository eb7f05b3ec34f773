"""Forwards of chains over block tables: one copy to the device, `varlen_attn` in every layer, in a graph where the
shape has one. Trees and models with a soft cap take the gather of `specdec.engine.layout` instead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec.engine import attention
from specdec.engine.graphs import Bucket, Capture, Recording, bucket_of
from specdec.engine.layout import SequenceRows
from specdec.engine.packing import Packing
from specdec.engine.page_tables import ChainLayout, TableShape, pack_chains, unpack
from specdec.engine.varlen import PagedAttention

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChainLayers:
    """One forward as its attention layers see it; the counterpart of `attention.PagedForward`."""

    layout: ChainLayout
    kv: torch.Tensor  # [layers, 2, slots, kv_heads, head_dim]
    attend: PagedAttention
    page_size: int
    layers_called: list[int] = field(default_factory=list)

    def run_layer(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, rows, dim]
        key: torch.Tensor,  # [1, kv_heads, rows, dim]
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Output of all rows, [1, rows, heads, dim]."""
        if softcap is not None:
            raise attention.UnsupportedAttention(
                f"layer {layer} has a soft cap, which varlen attention does not compute"
            )
        self.layers_called.append(layer)
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        keys.index_copy_(0, self.layout.write_slots, key[0].transpose(0, 1))
        values.index_copy_(0, self.layout.write_slots, value[0].transpose(0, 1))
        rows = query[0].transpose(0, 1).contiguous()  # [rows, heads, dim]
        return self.attend(rows, keys, values, self.layout.tables, self.page_size, scaling, window)[None]


@dataclass(frozen=True, slots=True)
class _Played:
    buffer: torch.Tensor  # [numbers], int64, on the device; what the recording reads
    shape: TableShape
    recording: Recording


class ChainForward:
    """capture: None runs every forward eagerly."""

    def __init__(
        self,
        model: Any,
        kv: torch.Tensor,
        attend: PagedAttention,
        *,
        page_size: int,
        context_length: int,
        packing: Packing,
        capture: Capture | None,
    ) -> None:
        self.layers_called: list[int] = []
        """Attention layers of the last forward; those of the capture where it was a replay."""
        self._model = model
        self._kv = kv
        self._attend = attend
        self._page_size = page_size
        self._context_length = context_length
        self._packing = packing
        self._capture = capture
        self._played: dict[Bucket, _Played] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """Those that were captured."""
        return list(self._played)

    @torch.inference_mode()
    def run(self, sequences: Sequence[SequenceRows], wanted: Sequence[int]) -> torch.Tensor:
        """Logits of the wanted packed rows, [wanted or more, vocab], in the model's dtype. The next call may overwrite
        them."""
        most_rows = max(len(sequence.token_ids) for sequence in sequences)
        bucket = bucket_of(len(sequences), most_rows) if self._capture is not None else None
        played = self._played_for(bucket, sequences, wanted) if bucket is not None else None
        if played is None:
            return self._run_eagerly(sequences, wanted, most_rows)
        self._load(played, sequences, wanted)
        played.recording.replay()
        return played.recording.output

    def _run_eagerly(self, sequences: Sequence[SequenceRows], wanted: Sequence[int], most_rows: int) -> torch.Tensor:
        count = sum(len(sequence.token_ids) for sequence in sequences)
        rows = self._packing.rows(count)
        shape = self._shape(rows, len(sequences) + rows - count, most_rows)
        buffer = torch.from_numpy(pack_chains(sequences, wanted, shape, self._page_size)).to(self._kv.device)
        return self._forward(buffer, shape, self._packing.rows(len(wanted)))

    def _played_for(self, bucket: Bucket, sequences: Sequence[SequenceRows], wanted: Sequence[int]) -> _Played | None:
        played = self._played.get(bucket)
        if played is None and self._capture is not None:
            shape = self._shape(bucket.sequences * bucket.rows, bucket.sequences, bucket.rows)
            # The capture runs the forward too, so its buffer must hold one.
            numbers = pack_chains(sequences, wanted, shape, self._page_size)
            buffer = torch.from_numpy(numbers).to(self._kv.device)
            try:
                recording = self._capture(lambda: self._forward(buffer, shape, shape.rows))
            except RuntimeError as error:
                log.warning("CUDA graphs are off, a forward cannot be captured: %s", error)
                self._capture = None
                return None
            played = self._played[bucket] = _Played(buffer, shape, recording)
        return played

    def _load(self, played: _Played, sequences: Sequence[SequenceRows], wanted: Sequence[int]) -> None:
        numbers = torch.from_numpy(pack_chains(sequences, wanted, played.shape, self._page_size))
        if played.buffer.is_cuda:
            numbers = numbers.pin_memory()
        played.buffer.copy_(numbers, non_blocking=True)

    def _shape(self, rows: int, entries: int, most_rows: int) -> TableShape:
        # The context's length, not the batch's longest: kernels are chosen by it, and must not be by the neighbours.
        pages = -(-self._context_length // self._page_size)
        return TableShape(rows, entries, pages, most_rows, self._context_length)

    def _forward(self, buffer: torch.Tensor, shape: TableShape, count: int) -> torch.Tensor:
        """Logits of the first `count` wanted rows."""
        layout = unpack(buffer, shape)
        layers = ChainLayers(layout, self._kv, self._attend, self._page_size)
        with attention.running(layers):
            output = self._model(
                input_ids=layout.token_ids,
                position_ids=layout.positions,
                use_cache=False,
                logits_to_keep=layout.wanted[:count],
            )
        self.layers_called = layers.layers_called
        logits: torch.Tensor = output.logits
        return logits[0]
