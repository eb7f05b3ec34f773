"""The packed batch: where each row of one forward stands, what it writes and what it reads.

A row's bits must not depend on the rows beside it, nor on how its sequence was cut into forwards. Kernels choose their
order of summation by shape, so every shape that a row meets is a function of its own absolute position:

- the rows of a forward are padded to counts that give equal bits (see `packing`);
- attention runs in *tiles* of query positions, aligned to the absolute position, each with its own row of a batch: of
  8 positions, or of fewer that give equal bits;
- a tile's keys are padded to a multiple of 64 up to 512 and of 512 beyond;
- a tree row reads a gather of its own path in order, so it sees what a chain would see.

That is *exact* packing, which a target needs. A drafter may be packed loosely.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.candidates import ROOT
from specdec.engine.packing import PADDED, TILE, Packing

SMALL_KEYS = 64
LARGE_KEYS = 512

ZERO_SLOT = 0
"""Never written: pads gathers, so that no stale KV (perhaps NaN) is ever read."""
TRASH_SLOT = 1
"""Takes the KV of padding rows, never read."""

FEW_ROWS = 2
"""Up to so many rows of each sequence in one forward the smallest tiles are the cheapest."""
SHARED_TILES = 3
"""From so many tiles over the same keys on, they are gathered once and shared; fewer are batched with others."""
KEYS_PER_CALL = 2**17
"""Keys gathered for one attention call at most, to bound memory."""

Ints = NDArray[np.int64]


def padded_keys(count: int) -> int:
    unit = SMALL_KEYS if count <= LARGE_KEYS else LARGE_KEYS
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows: row i stands at `start + depth`, and its KV is written to `slots[start + i]`."""

    token_ids: Sequence[int]
    parents: Sequence[int] | None
    start: int
    slots: Ints  # [capacity], slot of each token of the sequence


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """All rows of a forward, the padding included, [rows] each."""

    token_ids: Ints
    positions: Ints
    write_slots: Ints


@dataclass(frozen=True, slots=True)
class _Path:
    """Rows that read the same keys, spread over tiles of the same padded key length."""

    key_slots: Ints  # [keys]
    tiles: dict[int, list[tuple[int, int]]]  # tile number -> (position in the tile, packed row)


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one padded key length, computed in one call. Either each has its own keys or all share one gather."""

    key_slots: torch.Tensor  # [tiles or 1, keys], int64
    positions: torch.Tensor  # [tiles, tile_size], int64; 0 where a tile's place has no row
    rows: torch.Tensor  # [tiles * tile_size], int64; packed row of each place, 0 where there is none

    @property
    def shares_keys(self) -> bool:
        return self.key_slots.shape[0] != self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """One packed forward of T rows (T includes the padding)."""

    token_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    write_slots: torch.Tensor  # [T]
    groups: tuple[TileGroup, ...]
    place_of_row: torch.Tensor  # [T]; index into the places of all tiles of all groups, in order


def pack(sequences: Sequence[SequenceRows], device: torch.device, packing: Packing = PADDED) -> Layout:
    """Packs the sequences' rows in order; sequence s starts at the sum of the row counts before it."""
    few = max(len(s.token_ids) for s in sequences) <= FEW_ROWS
    tile_size = packing.few_tile if few else TILE
    tokens = pack_tokens(sequences, packing)
    paths: list[_Path] = []
    first = 0
    for sequence in sequences:
        paths += _paths(sequence, first, tile_size)
        first += len(sequence.token_ids)
    groups = [_group(paths_of_call, tile_size) for paths_of_call in _calls(paths)]
    return Layout(
        token_ids=torch.from_numpy(tokens.token_ids).to(device)[None],
        positions=torch.from_numpy(tokens.positions).to(device)[None],
        write_slots=torch.from_numpy(tokens.write_slots).to(device),
        groups=tuple(_to_device(group, device) for group in groups),
        place_of_row=torch.from_numpy(_places(groups, len(tokens.token_ids))).to(device),
    )


def pack_tokens(sequences: Sequence[SequenceRows], packing: Packing) -> PackedTokens:
    """The sequences' rows in order, then those that pad."""
    count = sum(len(s.token_ids) for s in sequences)
    token_ids = np.zeros(packing.rows(count), np.int64)
    positions = np.zeros_like(token_ids)
    write_slots = np.full_like(token_ids, TRASH_SLOT)
    first = 0
    for sequence in sequences:
        end = first + len(sequence.token_ids)
        token_ids[first:end] = sequence.token_ids
        positions[first:end] = sequence.start + depths_of(sequence)
        write_slots[first:end] = sequence.slots[sequence.start : sequence.start + end - first]
        first = end
    return PackedTokens(token_ids, positions, write_slots)


def is_chain(parents: Sequence[int] | None) -> bool:
    return parents is None or all(parent == i - 1 for i, parent in enumerate(parents))


def depths_of(sequence: SequenceRows) -> Ints:
    """Of each row below the first that follows the KV prefix, [rows]."""
    if is_chain(sequence.parents):
        return np.arange(len(sequence.token_ids), dtype=np.int64)
    depths: list[int] = []
    for parent in sequence.parents or ():
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return np.array(depths, np.int64)


def _paths(sequence: SequenceRows, first_row: int, tile_size: int) -> list[_Path]:
    """The sequence's rows as paths from the root, each row on exactly one of them, split by padded key length."""
    count = len(sequence.token_ids)
    if is_chain(sequence.parents):
        branches: Iterable[tuple[list[int], int]] = [(list(range(count)), 0)]
    else:
        branches = branches_of(sequence.parents or ())
    paths: list[_Path] = []
    for nodes, new_from in branches:
        slots = np.concatenate((sequence.slots[: sequence.start], sequence.slots[sequence.start + np.array(nodes)]))
        by_keys: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for depth in range(new_from, len(nodes)):
            tile, place = divmod(sequence.start + depth, tile_size)
            by_keys[padded_keys((tile + 1) * tile_size)][tile].append((place, first_row + nodes[depth]))
        paths += [_Path(_padded(slots, keys), dict(tiles)) for keys, tiles in by_keys.items()]
    return paths


def branches_of(parents: Sequence[int]) -> Iterable[tuple[list[int], int]]:
    """For each leaf its path from the root, and the depth from which on no earlier path has covered it."""
    covered: set[int] = set()
    inner = set(parents)
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path: list[int] = []
        node = leaf
        while node != ROOT:
            path.append(node)
            node = parents[node]
        path.reverse()
        yield path, sum(node in covered for node in path)
        covered.update(path)


def _padded(slots: Ints, keys: int) -> Ints:
    padded = np.full(keys, ZERO_SLOT, np.int64)
    padded[: min(keys, len(slots))] = slots[:keys]
    return padded


def _calls(paths: Sequence[_Path]) -> list[list[_Path]]:
    """Which paths go into one attention call: all small ones of equal padded key length; a long one alone."""
    calls: list[list[_Path]] = []
    small: dict[int, list[_Path]] = defaultdict(list)
    for path in paths:
        if len(path.tiles) >= SHARED_TILES:
            calls.append([path])
        else:
            small[len(path.key_slots)] += [_Path(path.key_slots, {tile: rows}) for tile, rows in path.tiles.items()]
    for keys, singles in small.items():
        step = max(1, KEYS_PER_CALL // keys)
        calls += [singles[i : i + step] for i in range(0, len(singles), step)]
    return calls


def _group(paths: Sequence[_Path], tile_size: int) -> tuple[Ints, Ints, Ints]:
    """(key_slots, positions, rows) of a `TileGroup`; rows is -1 where a place has none."""
    tiles = [tile for path in paths for tile in path.tiles.items()]
    positions = np.zeros((len(tiles), tile_size), np.int64)
    rows = np.full((len(tiles), tile_size), -1, np.int64)
    for i, (tile, members) in enumerate(tiles):
        for place, row in members:
            positions[i, place] = tile * tile_size + place
            rows[i, place] = row
    return np.stack([path.key_slots for path in paths]), positions, rows.ravel()


def _to_device(group: tuple[Ints, Ints, Ints], device: torch.device) -> TileGroup:
    key_slots, positions, rows = group
    return TileGroup(
        torch.from_numpy(key_slots).to(device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(np.maximum(rows, 0)).to(device),
    )


def _places(groups: Sequence[tuple[Ints, Ints, Ints]], count: int) -> Ints:
    """Place of each packed row among all tiles' places; padding rows read place 0, whose value nobody uses."""
    places = np.zeros(count, np.int64)
    rows = np.concatenate([rows for _, _, rows in groups])
    has_row = np.flatnonzero(rows >= 0)
    places[rows[has_row]] = has_row
    return places
