"""Linear layers that read the same rows, computed as one: each costs a wake-up of the threads and a kernel's start,
which is much of a small model's forward of few rows.

The model goes on calling its own layers. Each of these is then a part of the one that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What transformers calls the layers of one module that read the same rows."""


class FusedLinear(nn.Module):
    """The layers of a group, their outputs side by side."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self._sizes = [linear.out_features for linear in linears]
        self.whole: nn.Module = _joined(linears)
        self._rows: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Output of layer `index` for rows [..., in_features]. The first one that is asked computes for all."""
        if index == 0 or rows is not self._rows:
            self._rows, self._outputs = rows, self.whole(rows).split(self._sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._rows, self._outputs = None, ()
        return output


class LinearPart(nn.Module):
    """One layer of a group."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = fused
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return self.fused.part(self._index, rows)


@torch.inference_mode()
def fuse_linears(model: Any) -> int:
    """Fuses each group of linear layers in `model`. Returns how many groups."""
    count = 0
    for parent in list(model.modules()):
        for names in GROUPS:
            linears = [getattr(parent, name, None) for name in names]
            if not _fit(linears):
                continue
            fused = FusedLinear(linears)
            for index, name in enumerate(names):
                setattr(parent, name, LinearPart(fused, index))
            count += 1
    return count


def shared_linear(*linears: nn.Module) -> nn.Module | None:
    """The layer that the linear layers of a fused group are parts of."""
    first = linears[0]
    return first.fused.whole if isinstance(first, LinearPart) else None


def joined(*linears: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives the outputs of all the linear layers for the same rows, side by side, [rows, sum of out_features]."""
    shared = shared_linear(*linears)
    if shared is not None:
        whole: Callable[[torch.Tensor], torch.Tensor] = shared.forward
        return whole
    return lambda rows: torch.cat([linear(rows) for linear in linears], dim=-1)


def _fit(linears: Sequence[Any]) -> TypeGuard[Sequence[nn.Linear]]:
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    return len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) == 1


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    first = linears[0]
    width = sum(linear.out_features for linear in linears)
    joined = nn.Linear(first.in_features, width, bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
