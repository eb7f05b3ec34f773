"""Exchanging the linear layers of a model for others that compute the same, or nearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def replace_linears(model: Any, replacement: Callable[[nn.Linear], nn.Module | None]) -> int:
    """Puts `replacement` of each bf16 `nn.Linear` in its place, unless that is None. Returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype != torch.bfloat16:
                continue
            new = replacement(child)
            if new is not None:
                setattr(parent, name, new)
                count += 1
    return count
