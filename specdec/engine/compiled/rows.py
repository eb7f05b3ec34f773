"""Which keys each row of a packed forward attends to, for attention that reads them where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.engine.layout import Ints, PackedTokens, SequenceRows, branches_of, is_chain, pack_tokens
from specdec.engine.packing import Packing


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Row i attends to `num_keys[i]` keys, at `key_slots[first_keys[i]:]`, its own the last; padding rows to none."""

    tokens: PackedTokens
    key_slots: Ints  # [any]
    first_keys: Ints  # [rows]
    num_keys: Ints  # [rows]


def pack_rows(sequences: Sequence[SequenceRows], packing: Packing) -> PackedRows:
    """Packs the sequences' rows in order; sequence s starts at the sum of the row counts before it."""
    tokens = pack_tokens(sequences, packing)
    first_keys, num_keys = np.zeros_like(tokens.token_ids), np.zeros_like(tokens.token_ids)
    key_slots: list[Ints] = []
    row = total = 0
    for sequence in sequences:
        start, count = sequence.start, len(sequence.token_ids)
        num_keys[row : row + count] = tokens.positions[row : row + count] + 1
        if is_chain(sequence.parents):
            first_keys[row : row + count] = total
            key_slots.append(sequence.slots[: start + count])
            total += start + count
        else:
            for nodes, new_from in branches_of(sequence.parents or ()):
                first_keys[[row + node for node in nodes[new_from:]]] = total
                key_slots += [sequence.slots[:start], sequence.slots[[start + node for node in nodes]]]
                total += start + len(nodes)
        row += count
    return PackedRows(tokens, np.concatenate(key_slots), first_keys, num_keys)
