"""Linear layers whose bf16 weights lie in oneDNN's own order: the same bits as torch's, without reordering per call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

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
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return output


@torch.inference_mode()
def pack_linears(model: Any) -> int:
    """Packs the linear layers of a bf16 model on a CPU, as far as a try shows equal bits. Returns how many.

    A weight that is tied to the embedding keeps its plain form there.
    """
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    count = 0
    works: dict[tuple[int, int, bool], bool] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype != torch.bfloat16:
                continue
            shape = (child.in_features, child.out_features, child.bias is not None)
            replacement = packed(child) if works.get(shape, True) else None
            if replacement is not None and shape not in works:
                works[shape] = _same_bits(child, replacement)
            if replacement is None or not works[shape]:
                works[shape] = False
                continue
            setattr(parent, name, replacement)
            count += 1
    return count


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
