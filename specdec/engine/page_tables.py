"""The packed batch for attention over block tables: chains only, one buffer of numbers, one copy to the device.

A forward has *entries*: its sequences, then padding entries of one row each that read the zero page. Rows that no entry
covers (a graph's bucket may have some) come last; their output is arbitrary and nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from specdec.engine.layout import TRASH_SLOT, Ints, SequenceRows

Buffer = TypeVar("Buffer", Ints, torch.Tensor)

_ROW_FIELDS = 4
"""Of each row: token id, position, write slot, and which row's logits are wanted in its place."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """All that a forward's kernels are chosen by, so all that a captured graph fixes. pages: of the longest context.
    most_rows, most_keys: of one entry, at most."""

    rows: int
    entries: int
    pages: int
    most_rows: int
    most_keys: int

    @property
    def numbers(self) -> int:
        return _ROW_FIELDS * self.rows + 2 * (self.entries + 1) + self.entries * (1 + self.pages)


@dataclass(frozen=True, slots=True)
class PageTables:
    """What attention over a block table reads, besides query and pool."""

    query_starts: torch.Tensor  # [entries + 1], int32; entry i has the rows from [i] to [i + 1]
    key_starts: torch.Tensor  # [entries + 1], int32; sums of key_lengths
    key_lengths: torch.Tensor  # [entries], int32; its own rows included
    pages: torch.Tensor  # [entries, pages], int32
    most_rows: int
    most_keys: int


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """One packed forward of chains."""

    token_ids: torch.Tensor  # [1, rows], int64
    positions: torch.Tensor  # [1, rows], int64
    write_slots: torch.Tensor  # [rows], int64
    wanted: torch.Tensor  # [rows], int64; the wanted rows first, then 0
    tables: PageTables


def pack_chains(sequences: Sequence[SequenceRows], wanted: Sequence[int], shape: TableShape, page_size: int) -> Ints:
    """The buffer that `unpack` reads, int64 [shape.numbers]. Sequence s's rows come behind those of the ones before."""
    buffer = np.zeros(shape.numbers, np.int64)
    rows, starts, key_starts, key_lengths, pages = _views(buffer, shape)
    token_ids, positions, write_slots, wanted_rows = rows
    write_slots[:] = TRASH_SLOT
    wanted_rows[: len(wanted)] = wanted
    first = 0
    for entry, sequence in enumerate(sequences):
        end, length = first + len(sequence.token_ids), sequence.start + len(sequence.token_ids)
        token_ids[first:end] = sequence.token_ids
        positions[first:end] = np.arange(sequence.start, length)
        write_slots[first:end] = sequence.slots[sequence.start : length]
        used = sequence.slots[:length:page_size] // page_size
        pages[entry, : len(used)] = used
        key_lengths[entry] = length
        starts[entry + 1] = end
        first = end
    for entry in range(len(sequences), shape.entries):
        first += 1
        key_lengths[entry] = 1
        starts[entry + 1] = first
    key_starts[1:] = np.cumsum(key_lengths)
    return buffer


def unpack(buffer: torch.Tensor, shape: TableShape) -> ChainLayout:
    """The parts of a buffer from `pack_chains`, on its device; no copy but the change to int32."""
    rows, starts, key_starts, key_lengths, pages = _views(buffer, shape)
    tables = PageTables(
        starts.to(torch.int32),
        key_starts.to(torch.int32),
        key_lengths.to(torch.int32),
        pages.to(torch.int32),
        shape.most_rows,
        shape.most_keys,
    )
    return ChainLayout(rows[0][None], rows[1][None], rows[2], rows[3], tables)


def _views(buffer: Buffer, shape: TableShape) -> tuple[Buffer, Buffer, Buffer, Buffer, Buffer]:
    """(rows [4, rows], query_starts, key_starts, key_lengths, pages [entries, pages])."""
    sizes = (_ROW_FIELDS * shape.rows, shape.entries + 1, shape.entries + 1, shape.entries)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return (
        buffer[: ends[0]].reshape(_ROW_FIELDS, shape.rows),
        buffer[ends[0] : ends[1]],
        buffer[ends[1] : ends[2]],
        buffer[ends[2] : ends[3]],
        buffer[ends[3] :].reshape(shape.entries, shape.pages),
    )
