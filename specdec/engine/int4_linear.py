"""Linear layers whose weights are rounded to 4 bits for few rows: a quarter of the bytes to read, for drafting only.

A drafter is limited by reading its weights while it drafts. A prefill is limited by arithmetic, which the rounded form
has more of: many rows take the weights as they are, and both forms are kept. Rounding changes what a drafter proposes a
little, and the output not at all: the target decides. A target is never rounded like this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specdec.engine.linear_layers import replace_linears
from specdec.engine.packed_linear import packed

GROUP_SIZES = (32, 64, 128)
"""Input features that share a scale and a zero point; torch's kernel knows these and 256. The smallest that divides
them is taken: it is the nearest to the weights and costs no time."""
LEVELS = 15
MOST_ROUNDED_ROWS = 8
"""ms per forward of Qwen2.5-Coder 0.5B, rounded / bf16: 71 / 86 with 8 rows, 114 / 99 with 16, 796 / 409 with 150."""
MIDDLE = 8
"""The kernel reads a stored value v as (v - 8) * scale + zero."""


class Int4Linear(nn.Module):
    """`nn.Linear` in bf16 with its weight rounded to the nearest of 16 levels per group of inputs, for few rows."""

    def __init__(self, linear: nn.Linear, group_size: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group_size = group_size
        self._packed, self._scales = rounded(linear.weight.detach(), group_size)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._whole = packed(linear) or linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        if len(flat) > MOST_ROUNDED_ROWS:
            whole: torch.Tensor = self._whole(rows)
            return whole
        output: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            flat, self._packed, self._group_size, self._scales
        )
        if self._bias is not None:
            output += self._bias
        return output.view(*rows.shape[:-1], self.out_features)


@dataclass(frozen=True, slots=True)
class Levels:
    """A weight [out, in] as `levels * scales + lowest`."""

    levels: torch.Tensor  # [out, in], int32, 0 to LEVELS
    scales: torch.Tensor  # [out, in / group_size]
    lowest: torch.Tensor  # [out, in / group_size]


def levels_of(weight: torch.Tensor, group_size: int) -> Levels:
    """The nearest levels between the lowest and the highest weight of each group of inputs, which must divide them."""
    grouped = weight.float().view(len(weight), -1, group_size)  # [out, groups, group_size]
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / LEVELS).clamp(min=1e-8)
    levels = ((grouped - low[..., None]) / scale[..., None]).round_().clamp_(0, LEVELS).flatten(1).to(torch.int32)
    return Levels(levels, scale, low)


def rounded(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [out, in] as torch's kernel wants it: packed levels, and (scale, zero) [in / group_size, out, 2]."""
    found = levels_of(weight, group_size)
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(found.levels, 1)
    zero = found.lowest + MIDDLE * found.scales
    return packed, torch.stack((found.scales, zero), dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)


def can_round(model: Any) -> bool:
    """Whether this build of torch has the kernel for it: bf16 on a CPU."""
    kernel = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return bool(kernel and model.device.type == "cpu" and model.dtype == torch.bfloat16)


@torch.inference_mode()
def round_linears(model: Any) -> int:
    """Rounds every linear layer whose width a group divides, of a model that `can_round`. Returns how many."""
    return replace_linears(model, _rounded_layer)


def _rounded_layer(linear: nn.Linear) -> Int4Linear | None:
    group_size = next((size for size in GROUP_SIZES if linear.in_features % size == 0), None)
    return None if group_size is None or linear.out_features % 16 else Int4Linear(linear, group_size)
