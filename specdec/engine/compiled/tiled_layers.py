"""The layers of a model all of whose linear layers are tiled, as one kernel (see `layers`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec.engine.compiled.kernels import Elements, Ints
from specdec.engine.compiled.layers import OTHER_PHASES, PHASES_PER_LAYER, Batch, Buffers, Weights, run_layers
from specdec.engine.compiled.rows import PackedRows
from specdec.engine.compiled.team import Team
from specdec.engine.compiled.tiled_linear import FEW_PRODUCTS, RoundedTiledLinear, TiledLinear
from specdec.engine.fused_linear import shared_linear
from specdec.engine.int4_linear import MOST_ROUNDED_ROWS

Tiled = TiledLinear | RoundedTiledLinear


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Elements of a row between the products of a layer."""

    projected: int
    attended: int
    expanded: int
    gated: int


class TiledLayers:
    """kv: [layers, 2, slots, kv_heads, dim]."""

    def __init__(
        self, weights: Weights, rounded: Weights | None, linears: Sequence[Sequence[Tiled]], team: Team
    ) -> None:
        """rounded: for few rows."""
        self._weights = weights
        self._rounded = rounded
        self._sizes = _Sizes(
            projected=linears[0][0].out_features,
            attended=linears[0][1].in_features,
            expanded=linears[0][2].out_features,
            gated=linears[0][3].in_features,
        )
        self._team = team
        self._products = sum(linear.in_features * linear.out_features for layer in linears for linear in layer)

    @classmethod
    def of(cls, model: Any, kv: torch.Tensor, team: Team) -> TiledLayers | None:
        """None unless every linear layer is tiled."""
        layers, output = [_linears_of(layer) for layer in model.model.layers], model.lm_head
        every = [output, *(linear for layer in layers for linear in layer)]
        if all(isinstance(linear, TiledLinear) for linear in every):
            return cls(_weights_of(model, kv, layers, output), None, layers, team)
        if not all(isinstance(linear, RoundedTiledLinear) for linear in every):
            return None
        whole = [[linear.whole for linear in layer] for layer in layers]
        weights = _weights_of(model, kv, whole, output.whole)
        rounded = weights._replace(panels=_addresses(layers), output_panels=output.address, rounded=True)
        return cls(weights, rounded, layers, team)

    def run(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rows: PackedRows, wanted: Sequence[int],
        vocabulary_size: int,
    ) -> torch.Tensor:  # fmt: skip
        """Logits of the wanted rows, [wanted, vocabulary_size], float32 of what bf16 holds. hidden: the embeddings
        [rows, width], which are overwritten; cosine, sine: [rows, dim]."""
        count, width = hidden.shape
        batch = Batch(
            cosine=bits(cosine),
            sine=bits(sine),
            write_slots=rows.tokens.write_slots,
            key_slots=rows.key_slots,
            first_keys=rows.first_keys,
            num_keys=rows.num_keys,
            most_keys=int(rows.num_keys.max()),
            wanted=np.array(wanted, np.int64),
        )
        sizes = self._sizes
        buffers = Buffers(
            hidden=bits(hidden),
            normalized=_empty(count, width),
            projected=_empty(count, sizes.projected),
            attended=_empty(count, sizes.attended),
            added=_empty(count, width),
            expanded=_empty(count, sizes.expanded),
            gated=_empty(count, sizes.gated),
            last=_empty(len(wanted), width),
            logits=np.empty((len(wanted), vocabulary_size), np.float32),
        )
        weights = self._weights if self._rounded is None or count > MOST_ROUNDED_ROWS else self._rounded
        phases = PHASES_PER_LAYER * len(weights.panels) + OTHER_PHASES
        alone = self._products * count < FEW_PRODUCTS
        self._team.run(phases, run_layers, weights, batch, buffers, alone=alone)
        return torch.from_numpy(buffers.logits)


def _empty(*size: int) -> Elements:
    return np.empty(size, np.uint16)


def bits(tensor: torch.Tensor) -> Elements:
    """The memory of a bf16 tensor as kernels take it."""
    array: Elements = tensor.detach().contiguous().view(torch.uint16).numpy()
    return array


def _linears_of(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        shared_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        attention.o_proj,
        shared_linear(mlp.gate_proj, mlp.up_proj),
        mlp.down_proj,
    )


def _addresses(linears: Sequence[Sequence[Tiled]]) -> Ints:
    return np.array([[linear.address for linear in layer] for layer in linears], np.int64)


def _weights_of(model: Any, kv: torch.Tensor, linears: Sequence[Sequence[TiledLinear]], output: TiledLinear) -> Weights:
    decoder = model.model
    norms = [norm for layer in decoder.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return Weights(
        norms=np.stack([bits(norm.weight) for norm in (*norms, decoder.norm)]),
        panels=_addresses(linears),
        rounded=False,
        project_biases=np.stack([layer[0].bias for layer in linears]),
        merge_biases=np.stack([layer[1].bias for layer in linears]),
        expand_biases=np.stack([layer[2].bias for layer in linears]),
        reduce_biases=np.stack([layer[3].bias for layer in linears]),
        output_panels=output.address,
        output_bias=output.bias,
        kv=bits(kv),
        scalings=np.array([float(layer.self_attn.scaling) for layer in decoder.layers], np.float32),
        epsilon=float(model.config.rms_norm_eps),
    )
