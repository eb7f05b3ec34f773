"""The model runner: a Hugging Face causal LM over our paged KV, behind the `LanguageModel` seam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.candidates import ROOT
from specdec.engine import attention
from specdec.engine.block_pool import RESERVED_BLOCKS, BlockPool
from specdec.engine.chain_forward import ChainForward
from specdec.engine.graphs import Capture
from specdec.engine.int4_linear import round_linears
from specdec.engine.layout import Ints, SequenceRows, is_chain, pack
from specdec.engine.model import Segment
from specdec.engine.packed_linear import pack_linears
from specdec.engine.packing import PADDED, Packing
from specdec.engine.varlen import PagedAttention
from specdec.log import Log

if TYPE_CHECKING:
    from specdec.engine.compiled.decoder import CompiledDecoder

PAGE_SIZE_CPU = 16
PAGE_SIZE_CUDA = 256


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the KV of one token looks like."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, ranks: int = 1) -> KvShape:
        """ranks: among which the heads are divided."""
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, kv_heads // ranks, head_dim, dtype)


@dataclass(slots=True)
class _Sequence:
    """What the runner holds of one sequence. `token_ids` are those whose KV is kept."""

    log: Log
    blocks: list[int]
    slots: Ints  # [capacity]
    token_ids: list[int] = field(default_factory=list)
    registered: int = 0
    """Blocks from the start that were offered to the prefix index."""
    segment: Segment | None = None
    """The last one run, until rows of it are kept."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


class ModelRunner:
    """`LanguageModel` over a Hugging Face model: with decoder layers of our own where it is `is_compilable`, else with
    its own, whose attention calls `outrider_paged`.

    `kv_blocks` blocks of `page_size` tokens are allocated at once (the operating system backs them when touched).
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        vocabulary_size: int,
        context_length: int,
        kv_blocks: int,
        page_size: int = PAGE_SIZE_CPU,
        implementation: str = "sdpa",
        compiled: bool = False,
        packing: Packing = PADDED,
        paged: PagedAttention | None = None,
        capture: Capture | None = None,
    ) -> None:
        """implementation: of the attention over gathered keys. compiled: the layers are our own (see
        `specdec.engine.compiled`), and nothing is gathered. paged: the attention over block tables, which then takes
        all chains; capture: records its graphs."""
        self.name = name
        self.vocabulary_size = vocabulary_size
        self.context_length = context_length
        self.model = model
        self._device: torch.device = model.device
        self.device = str(model.device)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.packing = packing
        self.numeric_noise = 0.0
        self.attend = attention.IMPLEMENTATIONS[implementation]
        self._pool = BlockPool(kv_blocks, page_size)
        self._kv = _empty_kv(model, (kv_blocks + RESERVED_BLOCKS) * page_size)
        self._decoder: CompiledDecoder | None = None
        if compiled:
            from specdec.engine.compiled.decoder import CompiledDecoder

            self._decoder = CompiledDecoder(model, self._kv)
        self._chains: ChainForward | None = None
        if paged is not None:
            self._chains = ChainForward(
                model,
                self._kv,
                paged,
                page_size=page_size,
                context_length=context_length,
                packing=packing,
                capture=capture,
            )
        self._sequences: dict[str, _Sequence] = {}
        self.layers_called: list[int] = []
        """Attention layers that the last forward called, in order."""
        attention.register()
        model.set_attn_implementation(attention.ATTENTION_NAME)

    @property
    def is_compiled(self) -> bool:
        return self._decoder is not None

    @property
    def is_tiled(self) -> bool:
        """Whether products of bf16 are our own too (see `specdec.engine.compiled.products`)."""
        return self._decoder is not None and self._decoder.is_tiled

    def pack_linears(self) -> None:
        """Lays the weights of plain linear layers out as they are read fastest. To be called before the first forward,
        and after others were exchanged."""
        if self._decoder is None or not self._decoder.tile_linears():
            pack_linears(self.model)
        self.linears_changed()

    def round_linears_to_int4(self) -> bool:
        """Rounds the weights for few rows, of a drafter. Whether there was any to round."""
        if self._decoder is not None and self._decoder.tile_linears(rounded=True):
            return True
        return bool(round_linears(self.model))

    def use_stock_layers(self) -> None:
        """Those of the model, from the next forward on."""
        self._decoder = None

    def linears_changed(self) -> None:
        """To be called when linear layers of the model were exchanged for others."""
        if self._decoder is not None:
            self._decoder.linears_changed()

    @property
    def blocks_used(self) -> int:
        return self._pool.used

    @property
    def blocks_total(self) -> int:
        return self._pool.total

    def open(self, sequence_id: str, log: Log) -> int:
        """See `LanguageModel.open`. Raises ValueError if it is open already."""
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id} is open already")
        page = self._pool.page_size
        blocks = self._pool.acquire_prefix(log, max(0, len(log) - 1) // page)
        cached = len(blocks) * page
        self._sequences[sequence_id] = _Sequence(
            log, blocks, self._slots_of(blocks), log.token_ids[:cached], registered=len(blocks)
        )
        return cached

    def kv_length(self, sequence_id: str) -> int:
        return self._sequences[sequence_id].length

    def reserve(self, sequence_id: str, rows: int) -> bool:
        sequence = self._sequences[sequence_id]
        self._register_full_blocks(sequence)
        page = self._pool.page_size
        tail = sequence.length // page if sequence.length % page else None
        copies_tail = tail is not None and self._pool.is_shared(sequence.blocks[tail])
        missing = max(0, -(-(sequence.length + rows) // page) - len(sequence.blocks))
        fresh = self._pool.allocate(missing + copies_tail)
        if fresh is None:
            return False
        if tail is not None and copies_tail:
            self._replace_tail(sequence, tail, fresh.pop())
        elif tail is not None:
            self._pool.forget(sequence.blocks[tail])
        if fresh or copies_tail:
            sequence.blocks += fresh
            sequence.slots = self._slots_of(sequence.blocks)
        return True

    def _replace_tail(self, sequence: _Sequence, tail: int, block: int) -> None:
        """A block that others read is not written: this sequence goes on in a copy."""
        old = sequence.blocks[tail]
        self._move(torch.from_numpy(self._slots_of([old])), torch.from_numpy(self._slots_of([block])))
        self._pool.release([old])
        sequence.blocks[tail] = block

    def _slots_of(self, blocks: Sequence[int]) -> Ints:
        page = self._pool.page_size
        return (np.array(blocks, np.int64)[:, None] * page + np.arange(page)).reshape(-1)

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """See `LanguageModel.forward`. Raises ValueError for a segment without rows or without reserved room."""
        sequences = [self._sequences[segment.sequence_id] for segment in segments]
        for sequence, segment in zip(sequences, segments, strict=True):
            _check_room(sequence, segment)
            sequence.segment = None
        rows = [_rows_of(*pair) for pair in zip(sequences, segments, strict=True)]
        if self._decoder is not None:
            logits = self._run_compiled(self._decoder, rows, _wanted_rows(segments))
        elif self._chains is not None and all(is_chain(sequence.parents) for sequence in rows):
            logits = self._run_chains(self._chains, rows, _wanted_rows(segments))
        else:
            layout = pack(rows, self._device, self.packing)
            logits = self._run(attention.PagedForward(layout, self._kv, self.attend), _wanted_rows(segments))
        for sequence, segment in zip(sequences, segments, strict=True):
            sequence.segment = segment
        return list(torch.split(logits, [segment.num_logits for segment in segments]))

    @torch.inference_mode()
    def _run_compiled(self, decoder: CompiledDecoder, rows: list[SequenceRows], wanted: list[int]) -> torch.Tensor:
        """As `_run`, with layers of our own."""
        return decoder.run(rows, wanted, self.packing, self.vocabulary_size)

    @torch.inference_mode()
    def _run_chains(self, chains: ChainForward, rows: list[SequenceRows], wanted: list[int]) -> torch.Tensor:
        """As `_run`, over block tables."""
        logits = chains.run(rows, wanted)
        self.layers_called = chains.layers_called
        return logits[: len(wanted), : self.vocabulary_size].to(torch.float32, copy=True)

    @torch.inference_mode()
    def _run(self, forward: attention.PagedForward, wanted: list[int]) -> torch.Tensor:
        """Logits of the wanted rows, float32, [wanted, vocabulary_size]."""
        layout = forward.layout
        # The output layer is padded too: its bits depend on its row count like any other.
        padded = wanted + [0] * (self.packing.rows(len(wanted)) - len(wanted))
        with attention.running(forward):
            output = self.model(
                input_ids=layout.token_ids,
                position_ids=layout.positions,
                use_cache=False,
                logits_to_keep=torch.tensor(padded, device=self._device),
            )
        self.layers_called = forward.layers_called
        logits: torch.Tensor = output.logits
        return logits[0, : len(wanted), : self.vocabulary_size].float()

    def keep(self, sequence_id: str, rows: Sequence[int]) -> None:
        """See `LanguageModel.keep`. Raises ValueError if the rows are no path of the last segment from its root."""
        sequence = self._sequences[sequence_id]
        segment, sequence.segment = sequence.segment, None
        if segment is None:
            raise ValueError(f"sequence {sequence_id} has no rows to keep: none were run since the last keep")
        _check_path(segment, rows)
        start = sequence.length
        moved = [(row, i) for i, row in enumerate(rows) if row != i]
        if moved:
            source = torch.from_numpy(sequence.slots[[start + row for row, _ in moved]])
            self._move(source, torch.from_numpy(sequence.slots[[start + i for _, i in moved]]))
        sequence.token_ids += [segment.token_ids[row] for row in rows]
        self._free_tail(sequence)
        self._register_full_blocks(sequence)

    def _move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies KV between slots, [slots] each, int64 on the CPU."""
        self._kv[:, :, target.to(self._device)] = self._kv[:, :, source.to(self._device)]

    def truncate(self, sequence_id: str, length: int) -> None:
        sequence = self._sequences[sequence_id]
        sequence.segment = None
        if length >= sequence.length:
            return
        self._register_full_blocks(sequence)
        del sequence.token_ids[length:]
        self._free_tail(sequence)
        sequence.registered = min(sequence.registered, length // self._pool.page_size)

    def release(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self._register_full_blocks(sequence)
        self._pool.release(sequence.blocks)

    def _free_tail(self, sequence: _Sequence) -> None:
        """Gives back the blocks behind the kept tokens."""
        needed = -(-sequence.length // self._pool.page_size)
        if needed < len(sequence.blocks):
            self._pool.release(sequence.blocks[needed:])
            del sequence.blocks[needed:]
            sequence.slots = self._slots_of(sequence.blocks)

    def _register_full_blocks(self, sequence: _Sequence) -> None:
        """Makes blocks findable whose slots are all written and committed: KV is kept and the log says the same."""
        page = self._pool.page_size
        full = min(sequence.length, len(sequence.log)) // page
        for index in range(sequence.registered, full):
            start, end = index * page, (index + 1) * page
            if sequence.token_ids[start:end] != sequence.log.token_ids[start:end]:
                return  # the log was rolled back and went another way: a draft worker's KV not yet realigned
            self._pool.register(sequence.blocks[index], sequence.log, start)
            sequence.registered = index + 1

    def check_integrity(self) -> None:
        """Raises `PoolCorrupt` if the pool's books contradict the sequences' block tables."""
        self._pool.check_integrity([sequence.blocks for sequence in self._sequences.values()])


def ranks_of(model: Any) -> int:
    """Processes among which the model's heads are divided (`specdec.engine.parallel`)."""
    return getattr(model, "_tp_size", None) or 1


def _empty_kv(model: Any, slots: int) -> torch.Tensor:
    """[layers, 2, slots, kv_heads, head_dim]; K then V."""
    shape = KvShape.of(model.config.get_text_config(), model.dtype, ranks_of(model))
    return _zeros((shape.layers, 2, slots, shape.kv_heads, shape.head_dim), shape.dtype, model.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on a CPU take memory only where they are written: numpy leaves untouched pages to the system, torch
    writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _check_room(sequence: _Sequence, segment: Segment) -> None:
    if not segment.token_ids:
        raise ValueError(f"sequence {segment.sequence_id}: a segment needs at least one row")
    if sequence.length + len(segment.token_ids) > len(sequence.slots):
        raise ValueError(f"sequence {segment.sequence_id}: room for {len(segment.token_ids)} rows was not reserved")


def _rows_of(sequence: _Sequence, segment: Segment) -> SequenceRows:
    return SequenceRows(segment.token_ids, segment.parents, sequence.length, sequence.slots)


def _wanted_rows(segments: Sequence[Segment]) -> list[int]:
    """Packed rows whose logits are wanted, in order."""
    wanted: list[int] = []
    end = 0
    for segment in segments:
        end += len(segment.token_ids)
        wanted += range(end - segment.num_logits, end)
    return wanted


def _check_path(segment: Segment, rows: Sequence[int]) -> None:
    parents = segment.parents if segment.parents is not None else range(-1, len(segment.token_ids) - 1)
    if [parents[row] for row in rows] != [ROOT, *rows][: len(rows)]:
        raise ValueError(f"rows {list(rows)} are no path from the root of the last segment")
