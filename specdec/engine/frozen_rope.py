"""RoPE tables that depend on the longest sequence in a batch, frozen for the served context.

`dynamic` and `longrope` recompute their frequencies from the largest position in each forward, so a row would depend
on the rows beside it and old KV would not fit new rows. We let them adapt once, to the served context.
"""

from __future__ import annotations

from typing import Any

import torch

FROZEN = "frozen"


@torch.no_grad()
def freeze_rope(model: Any, context_length: int) -> bool:
    """Freezes every such table of `model`; returns whether there was one."""
    found = False
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        moving = {key for key, kind in kinds.items() if _moves(kind)}
        for key in moving:
            position = torch.tensor([[context_length - 1]], device=model.device)
            module(torch.zeros(1, device=model.device), position, **({} if key is None else {"layer_type": key}))
        if moving:
            found = True
            frozen = {key: FROZEN if key in moving else kind for key, kind in kinds.items()}
            module.rope_type = frozen if isinstance(rope_type, dict) else FROZEN
    return found


def _moves(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)
