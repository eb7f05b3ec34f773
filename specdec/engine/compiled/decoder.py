"""The forward of Llama-like models with compiled kernels between the matrix products (see `kernels`).

The model's own modules hold the weights and do the products, so rounded and packed linear layers work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.compiled import kernels
from specdec.engine.compiled.row_threads import RowThreads
from specdec.engine.compiled.rows import PackedRows, pack_rows
from specdec.engine.compiled.team import Team
from specdec.engine.compiled.tiled_layers import TiledLayers
from specdec.engine.compiled.tiled_linear import tile_linears
from specdec.engine.fused_linear import fuse_linears, joined
from specdec.engine.layout import SequenceRows
from specdec.engine.packing import Packing

MODELS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
"""Their layers: RMS norm, attention over all keys with rotated positions, RMS norm, gated linear unit."""

NORM, ROTATION, ATTENTION, GATE = 0.4, 1.5, 0.13, 0.6
"""Nanoseconds per element, measured on one core: so that rows are divided among threads only where it pays."""

Linear = Callable[[torch.Tensor], torch.Tensor]


def is_compilable(model: Any) -> bool:
    """Whether `CompiledDecoder` computes what this model does, or that which it is the outline of."""
    kind, config = type(model).__name__, model.config
    if kind not in MODELS or model.device.type not in ("cpu", "meta") or getattr(model, "_tp_size", None):
        return False
    if model.dtype not in (torch.bfloat16, torch.float32) or config.hidden_act != "silu":
        return False
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if kind == "MistralForCausalLM":
        windows.append(config.sliding_window)
    return all(window is None for window in windows)


def elements(tensor: torch.Tensor) -> kernels.Elements:
    """The tensor's memory as the kernels take it."""
    array: kernels.Elements = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


@dataclass(frozen=True, slots=True)
class _Layer:
    project: Linear  # to query, key and value
    merge: Linear  # what was attended
    expand: Linear  # to gate and up
    reduce: Linear
    attention_norm: kernels.Elements  # [width]
    mlp_norm: kernels.Elements
    keys: kernels.Elements  # [slots, kv_heads, dim]
    values: kernels.Elements
    scaling: float
    next_norm: kernels.Elements
    """The attention's of the next layer, or the final one."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Nanoseconds of each kernel up to the end of each row, [rows]."""

    norm: NDArray[Any]
    rotation: NDArray[Any]
    attention: NDArray[Any]
    gate: NDArray[Any]


class CompiledDecoder:
    """kv: [layers, 2, slots, kv_heads, dim]. Linear layers of the model that read the same rows are fused; it must be
    `is_compilable`."""

    def __init__(self, model: Any, kv: torch.Tensor) -> None:
        fuse_linears(model)
        self._model = model
        self._kv = kv
        self._threads = RowThreads()
        self._epsilon = float(model.config.rms_norm_eps)
        self._attended_width: int = model.model.layers[0].self_attn.o_proj.in_features
        self._gated_width: int = model.config.intermediate_size
        self._layers: list[_Layer] = []
        self._team = Team()
        self._tiled = TiledLayers.of(model, kv, self._team)  # another runner may have tiled them

    @property
    def is_tiled(self) -> bool:
        """Whether all is one kernel, and a row has the same bits in any number of rows."""
        return self._tiled is not None

    def linears_changed(self) -> None:
        """To be called when linear layers of the model were exchanged for others."""
        self._layers = []
        self._tiled = TiledLayers.of(self._model, self._kv, self._team)

    def tile_linears(self, rounded: bool = False) -> bool:
        """Puts the weights of all linear layers into tiles, where that works; then nothing else has to pack them.
        rounded: to 4 bits for few rows."""
        if not tile_linears(self._model, self._team, rounded):
            return False
        self.linears_changed()
        return True

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[SequenceRows], wanted: Sequence[int], packing: Packing, vocabulary_size: int
    ) -> torch.Tensor:
        """Logits of the wanted packed rows, [wanted, vocabulary_size], float32."""
        rows = pack_rows(sequences, packing)
        hidden = self._model.model.embed_tokens(torch.from_numpy(rows.tokens.token_ids))  # [rows, width]
        positions = torch.from_numpy(rows.tokens.positions)[None]
        cosine, sine = self._model.model.rotary_emb(hidden, positions)  # [1, rows, dim]
        if self._tiled is not None:
            return self._tiled.run(hidden, cosine[0], sine[0], rows, wanted, vocabulary_size)
        normalized = self._run_layers(hidden, elements(cosine[0]), elements(sine[0]), rows)
        padding = [0] * (packing.rows(len(wanted)) - len(wanted))
        logits: torch.Tensor = self._model.lm_head(normalized[torch.tensor([*wanted, *padding])])
        return _widened(logits[: len(wanted), :vocabulary_size])

    def _run_layers(
        self, hidden: torch.Tensor, cosine: kernels.Elements, sine: kernels.Elements, rows: PackedRows
    ) -> torch.Tensor:
        """The hidden state behind the final norm, [rows, width]. hidden: the embeddings, which are overwritten."""
        if not self._layers:
            self._layers = [self._layer(index) for index in range(len(self._kv))]
        run, epsilon, slots = self._threads.run, self._epsilon, rows.tokens.write_slots
        normalized = torch.empty_like(hidden)
        attended = hidden.new_empty(len(hidden), self._attended_width)
        gated = hidden.new_empty(len(hidden), self._gated_width)
        state, normal, heads, gates = elements(hidden), elements(normalized), elements(attended), elements(gated)
        work = self._work(hidden, rows)
        run(work.norm, kernels.normalize, state, self._layers[0].attention_norm, epsilon, normal)
        for layer in self._layers:
            parts = elements(layer.project(normalized))
            run(work.rotation, kernels.rotate_and_store, parts, cosine, sine, layer.keys, layer.values, slots)
            run(
                work.attention, kernels.attend,
                parts, layer.keys, layer.values, rows.key_slots, rows.first_keys, rows.num_keys, layer.scaling, heads,
            )  # fmt: skip
            merged = elements(layer.merge(attended))
            run(work.norm, kernels.add_and_normalize, state, merged, layer.mlp_norm, epsilon, normal)
            run(work.gate, kernels.gate, elements(layer.expand(normalized)), gates)
            reduced = elements(layer.reduce(gated))
            run(work.norm, kernels.add_and_normalize, state, reduced, layer.next_norm, epsilon, normal)
        return normalized

    def _work(self, hidden: torch.Tensor, rows: PackedRows) -> _Work:
        count, width = hidden.shape
        ends = np.arange(1, count + 1)
        projected = self._attended_width + 2 * self._layers[0].keys[0].size
        return _Work(
            norm=ends * (width * NORM),
            rotation=ends * (projected * ROTATION),
            attention=np.cumsum(rows.num_keys) * (self._attended_width * ATTENTION),
            gate=ends * (self._gated_width * GATE),
        )

    def _layer(self, index: int) -> _Layer:
        decoder = self._model.model
        layer = decoder.layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        last = index + 1 == len(decoder.layers)
        next_norm = decoder.norm if last else decoder.layers[index + 1].input_layernorm
        return _Layer(
            project=joined(attention.q_proj, attention.k_proj, attention.v_proj),
            merge=attention.o_proj.forward,
            expand=joined(mlp.gate_proj, mlp.up_proj),
            reduce=mlp.down_proj.forward,
            attention_norm=elements(layer.input_layernorm.weight.detach()),
            mlp_norm=elements(layer.post_attention_layernorm.weight.detach()),
            keys=elements(self._kv[index, 0]),
            values=elements(self._kv[index, 1]),
            scaling=float(attention.scaling),
            next_norm=elements(next_norm.weight.detach()),
        )


def _widened(logits: torch.Tensor) -> torch.Tensor:
    """float32. One row in bf16 is done before torch has woken its other threads for it."""
    if logits.dtype != torch.bfloat16 or len(logits) > 1:
        return logits.float()
    wide = logits.view(torch.int16).numpy().astype(np.int32)
    wide <<= 16
    return torch.from_numpy(wide).view(torch.float32)
