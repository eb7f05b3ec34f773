"""A packed batch as one row of numbers, for the broadcast from rank 0 to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.engine.layout import Layout, TileGroup
from specdec.engine.packing import TILE

_GROUP_NUMBERS = 3
"""Of each tile group: rows of key_slots, keys, tiles."""


def encode_batch(layout: Layout, wanted: Sequence[int]) -> torch.Tensor:
    """int64, [any], on the CPU: rows, wanted rows and groups; the shapes of the groups; then all that they hold."""
    sizes = [layout.token_ids.shape[1], len(wanted), len(layout.groups)]
    for group in layout.groups:
        sizes += [*group.key_slots.shape, group.positions.shape[0]]
    parts = [torch.tensor([*sizes, *wanted]), layout.token_ids, layout.positions, layout.write_slots]
    for group in layout.groups:
        parts += [group.key_slots, group.positions, group.rows]
    parts.append(layout.place_of_row)
    return torch.cat([part.reshape(-1).cpu() for part in parts])


def decode_batch(numbers: torch.Tensor, device: torch.device) -> tuple[Layout, list[int]]:
    """What `encode_batch` was given, the tensors on `device`."""
    rows, wanted_count, group_count = numbers[:3].tolist()
    reader = _Reader(numbers[3:])
    shapes = reader.take(group_count, _GROUP_NUMBERS).tolist()
    wanted = reader.take(wanted_count).tolist()
    token_ids, positions, write_slots = reader.take(1, rows), reader.take(1, rows), reader.take(rows)
    groups = tuple(
        TileGroup(
            reader.take(key_rows, keys).to(device),
            reader.take(tiles, TILE).to(device),
            reader.take(tiles * TILE).to(device),
        )
        for key_rows, keys, tiles in shapes
    )
    place_of_row = reader.take(rows)
    layout = Layout(token_ids.to(device), positions.to(device), write_slots.to(device), groups, place_of_row.to(device))
    return layout, wanted


class _Reader:
    """Takes one tensor after the other from a row of numbers."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._at = 0

    def take(self, *shape: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        self._at += count
        return self._numbers[self._at - count : self._at].view(shape)
