"""Linear layers whose bf16 weights lie in panels (see `products`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from specdec.engine.compiled.arena import Arena
from specdec.engine.compiled.pairs import runs_tiles
from specdec.engine.compiled.product_vectors import GROUP, TILE_WIDTH
from specdec.engine.compiled.products import Matrix, in_panels, in_rounded_panels, multiply, panels_of
from specdec.engine.compiled.team import Team
from specdec.engine.int4_linear import MOST_ROUNDED_ROWS, levels_of
from specdec.engine.linear_layers import replace_linears

FEW_PRODUCTS = 50_000_000
"""Which one thread has computed, in half a millisecond, before others have woken up and told that they are done."""
_PROBE_ROWS, _PROBE_OUTPUTS = 13, 200
_LARGEST_ERROR = 2.0**-7
"""Of what a probe gives, in the largest of its outputs: a rounding step of bf16, and half of one more for torch's."""


class TiledLinear(nn.Module):
    """`nn.Linear` for inference in bf16 on a CPU that `runs_tiles`. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear, team: Team, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self._team = team
        self._panels = in_panels(linear.weight.detach(), arena)
        self.bias = np.zeros(panels_of(self.out_features) * TILE_WIDTH, np.float32)  # [panels * TILE_WIDTH]
        if linear.bias is not None:
            self.bias[: self.out_features] = linear.bias.detach().float().numpy()

    @property
    def address(self) -> int:
        """Of the panels, which live as long as this does."""
        return int(self._panels.ctypes.data)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], bf16."""
        return _product(rows, self, False, self._team)


class RoundedTiledLinear(nn.Module):
    """The same with its weight rounded to 4 bits as well, for few rows (see `specdec.engine.int4_linear`)."""

    def __init__(self, linear: nn.Linear, team: Team, arena: Arena) -> None:
        super().__init__()
        self.whole = TiledLinear(linear, team, arena)
        self.in_features, self.out_features = self.whole.in_features, self.whole.out_features
        self.bias = self.whole.bias
        self._team = team
        weight = levels_of(linear.weight.detach(), GROUP)
        self._panels = in_rounded_panels(weight.levels, weight.scales, weight.lowest, arena)

    @property
    def address(self) -> int:
        """Of the rounded panels, which live as long as this does."""
        return int(self._panels.ctypes.data)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], bf16."""
        if rows.numel() > MOST_ROUNDED_ROWS * self.in_features:
            whole: torch.Tensor = self.whole(rows)
            return whole
        return _product(rows, self, True, self._team)


def _product(rows: torch.Tensor, linear: TiledLinear | RoundedTiledLinear, rounded: bool, team: Team) -> torch.Tensor:
    flat = rows.reshape(-1, linear.in_features).contiguous()
    outputs = flat.new_empty(len(flat), linear.out_features)
    source, target = flat.view(torch.uint16).numpy(), outputs.view(torch.uint16).numpy()
    alone = linear.in_features * linear.out_features * len(flat) < FEW_PRODUCTS
    matrix = Matrix(linear.address, rounded, linear.bias)
    team.run(1, multiply, source, matrix, target, alone=alone)
    return outputs.view(*rows.shape[:-1], linear.out_features)


@torch.inference_mode()
def tile_linears(model: Any, team: Team, rounded: bool = False) -> int:
    """Puts the weights of the linear layers of a bf16 model into panels, if each shape passes a try. Returns how many:
    all or none. rounded: also to 4 bits, for a drafter. A weight that is tied to the embedding keeps its plain form
    there."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    by_shape = {(linear.in_features, linear.out_features, linear.bias is not None): linear for linear in linears}
    if not runs_tiles() or model.dtype != torch.bfloat16 or not all(map(_is_right, by_shape.values())):
        return 0
    if rounded and any(linear.in_features % GROUP for linear in linears):
        return 0
    kind = RoundedTiledLinear if rounded else TiledLinear
    arena = Arena()
    return replace_linears(model, lambda linear: kind(linear, team, arena))


def _is_right(linear: nn.Linear) -> bool:
    """Whether a row has torch's outputs to rounding, and the same bits in any number of rows."""
    if linear.in_features % 2 or linear.weight.dtype != torch.bfloat16:
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBE_ROWS, linear.in_features, generator=generator).bfloat16()
    part = nn.Linear(linear.in_features, _PROBE_OUTPUTS, bias=linear.bias is not None, device="meta")
    part.weight = nn.Parameter(linear.weight[:_PROBE_OUTPUTS], requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias[:_PROBE_OUTPUTS], requires_grad=False)
    tiled = TiledLinear(part, Team(), Arena())
    outputs, expected = tiled(rows), functional.linear(rows, part.weight, part.bias).float()
    same = all(torch.equal(tiled(rows[:count]), outputs[:count]) for count in range(1, _PROBE_ROWS))
    return same and bool((outputs - expected).abs().max() <= _LARGEST_ERROR * expected.abs().max())
