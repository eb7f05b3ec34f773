"""Where the draws of many requests at once get their randomness: the real functions, asked for many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import noise
from specdec.noise import Domain
from tools.law_seams import DRAFT_UNIFORMS, TARGET_UNIFORMS


class Chances(Protocol):
    """Uniforms of `count` requests for one round, all float64 in (0, 1)."""

    def draft(self, base_length: int, rows: Tensor, levels: int, width: int) -> Tensor:
        """[rows, levels, width]"""
        ...

    def accept(self, base_length: int, rows: Tensor, candidates: int) -> Tensor:
        """[rows, candidates]"""
        ...

    def residual(self, base_length: int, rows: Tensor) -> Tensor:
        """[rows]"""
        ...


class ManyChances:
    """One long vector of uniforms per round and purpose."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draft(self, base_length: int, rows: Tensor, levels: int, width: int) -> Tensor:
        drawn: Tensor = DRAFT_UNIFORMS(self._seed, Domain.DRAFT, base_length, len(rows) * levels * width)
        return drawn.view(len(rows), levels, width)

    def accept(self, base_length: int, rows: Tensor, candidates: int) -> Tensor:
        drawn: Tensor = TARGET_UNIFORMS(self._seed, Domain.ACCEPT, base_length, len(rows) * candidates)
        return drawn.view(len(rows), candidates)

    def residual(self, base_length: int, rows: Tensor) -> Tensor:
        drawn: Tensor = TARGET_UNIFORMS(self._seed, Domain.RESIDUAL, base_length, len(rows))
        return drawn


class SeededChances:
    """Those that each request has under its own seed, as the workers make them; slow."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds

    def draft(self, base_length: int, rows: Tensor, levels: int, width: int) -> Tensor:
        """As `ModelDrafter` draws chains, and `TableDrafter` trees."""
        if width == 1:
            drawn = [DRAFT_UNIFORMS(self._seeds[i], Domain.DRAFT, base_length, levels) for i in rows.tolist()]
            return torch.stack(drawn)[:, :, None]
        return torch.stack(
            [
                torch.stack(
                    [
                        DRAFT_UNIFORMS(self._seeds[i] + base_length + level, Domain.DRAFT, base_length, width)
                        for level in range(levels)
                    ]
                )
                for i in rows.tolist()
            ]
        )

    def accept(self, base_length: int, rows: Tensor, candidates: int) -> Tensor:
        drawn = [TARGET_UNIFORMS(self._seeds[i], Domain.ACCEPT, base_length, candidates) for i in rows.tolist()]
        return torch.stack(drawn)

    def residual(self, base_length: int, rows: Tensor) -> Tensor:
        return torch.cat([TARGET_UNIFORMS(self._seeds[i], Domain.RESIDUAL, base_length, 1) for i in rows.tolist()])


class SeedColumn:
    """Stands for many seeds where the noise takes one; see `many_seeds`."""

    def __init__(
        self, seeds: Sequence[int], rows: Tensor | None = None, keys: dict[int, NDArray[np.int32]] | None = None
    ) -> None:
        self._seeds = seeds
        self._rows = rows
        self._keys = {} if keys is None else keys  # of all seeds, by position

    def keys(self, position: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Those of each row's seed, both int32 [rows, 1]."""
        keys = self._keys.get(position)
        if keys is None:
            pairs = [_ONE_KEY(seed, position) for seed in self._seeds]
            keys = self._keys[position] = np.array(pairs, dtype=np.int32)
        if self._rows is not None:
            keys = keys[self._rows.numpy()]
        return keys[:, :1], keys[:, 1:]

    def rows(self, rows: Tensor) -> SeedColumn:
        return SeedColumn(self._seeds, rows, self._keys)


_ONE_KEY = noise._position_keys


@contextmanager
def many_seeds() -> Iterator[None]:
    """While open, the functions of the noise take a `SeedColumn` for a seed and answer with a row for each."""

    def keys(seed: int | SeedColumn, position: int) -> tuple[object, object]:
        return seed.keys(position) if isinstance(seed, SeedColumn) else _ONE_KEY(seed, position)

    noise._position_keys = keys  # type: ignore[assignment]
    try:
        yield
    finally:
        noise._position_keys = _ONE_KEY
