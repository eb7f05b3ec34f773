"""Linear layers with weights rounded to 8 bits and one activation scale per row: half the bytes, in exact integers.

This is another model than the one that was rounded, so a user must ask for it. It is a target all the same: a row is
scaled by its own largest value alone, and sums of integers do not depend on their order. So no bit of a row depends on
the rows beside it, on their number, or on threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec.engine.linear_layers import replace_linears

LEVELS = 127
"""On either side of zero, of weights and of activations."""
MIDDLE = 128
"""The kernel wants activations without a sign: 128 stands for zero."""
SMALLEST = 1e-30
"""In place of the largest value of a row of zeros."""


class Int8Linear(nn.Module):
    """`nn.Linear` for inference on a CPU in bf16. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        levels, scales = rounded(linear.weight.detach())
        self._packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(levels, None)
        self._scales = scales / LEVELS  # [out]; that of a row lacks this division
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        largest = flat.abs().amax(dim=-1, keepdim=True).float().clamp_min_(SMALLEST)  # [rows, 1]
        # Half a level more, since the conversion cuts off what is behind the point.
        levels = (flat * (LEVELS / largest)).add_(MIDDLE + 0.5).to(torch.uint8)
        products: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            levels, 1.0, MIDDLE, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )  # [rows, out]
        products *= largest
        if self._bias is not None:
            products += self._bias
        return products.to(rows.dtype).view(*rows.shape[:-1], self.out_features)


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [out, in] as (levels [out, in], int8; scale [out], float32)."""
    scales = weight.abs().amax(dim=1).float().clamp_min_(SMALLEST) / LEVELS
    return weight.float().div_(scales[:, None]).round_().to(torch.int8), scales


def can_round_to_int8(model: Any) -> bool:
    """Whether this torch on this CPU multiplies 8-bit integers exactly: older CPUs cut pairs of products to 16 bits."""
    return model.device.type == "cpu" and model.dtype == torch.bfloat16 and _is_exact()


@torch.inference_mode()
def _is_exact() -> bool:
    """Tries the largest weights and activations, whose products overflow 16 bits."""
    linear = nn.Linear(64, 16, bias=False, dtype=torch.bfloat16)
    linear.weight.fill_(1.0)
    try:
        return torch.equal(
            Int8Linear(linear)(torch.ones(4, 64, dtype=torch.bfloat16)), torch.full((4, 16), 64.0).bfloat16()
        )
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


@torch.inference_mode()
def round_linears_to_int8(model: Any) -> int:
    """Rounds every linear layer, the output layer included, of a model that `can_round_to_int8`. Returns how many."""
    return replace_linears(model, Int8Linear)
