"""Linear layers whose bf16 weights lie in oneDNN's own order: the same bits as torch's, without reordering per call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec.engine.linear_layers import replace_linears

PROBE_ROWS = 4


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU in bf16. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self._packed, self._bias, "none", [], ""
        )
        return output


@torch.inference_mode()
def pack_linears(model: Any) -> int:
    """Packs the linear layers of a bf16 model on a CPU, as far as a try shows equal bits. Returns how many.

    A weight that is tied to the embedding keeps its plain form there.
    """
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    works: dict[tuple[int, int, bool], bool] = {}

    def tried(linear: nn.Linear) -> PackedLinear | None:
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        replacement = packed(linear) if works.get(shape, True) else None
        if shape not in works:
            works[shape] = replacement is not None and _same_bits(linear, replacement)
        return replacement if works[shape] else None

    return replace_linears(model, tried)


def packed(linear: nn.Linear) -> PackedLinear | None:
    """None where this build of torch cannot pack it."""
    try:
        return PackedLinear(linear)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def _same_bits(linear: nn.Linear, replacement: PackedLinear) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, PROBE_ROWS, linear.in_features, generator=generator).to(linear.weight.dtype)
    try:
        return torch.equal(replacement(rows), functional.linear(rows, linear.weight, linear.bias))
    except RuntimeError:
        return False
