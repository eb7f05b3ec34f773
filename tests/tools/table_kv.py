"""Paged storage of token ids in place of KV: blocks, reference counts, prefix sharing, rollback.

What a table model computes is read from here and never from the log, so a caller that rolls back wrongly changes the
output, as with a real model.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.log import Log

UNWRITTEN = -1


@dataclass
class TableSequence:
    """One sequence's view of the store. length: slots that are kept; parents: of the rows behind them, not yet kept."""

    log: Log
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    parents: tuple[int, ...] = ()


class TableStore:
    """Blocks of `page` slots. A full committed block stays findable by its digest while idle, until it is reused."""

    def __init__(self, blocks_total: int, page: int) -> None:
        self.page = page
        self.blocks_total = blocks_total
        self._slots: dict[int, list[int]] = {}  # of blocks that were taken once
        self._references = [0] * blocks_total
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks_total))
        self._digest_of: dict[int, bytes] = {}
        self._found_by: dict[bytes, int] = {}

    @property
    def blocks_used(self) -> int:
        return self.blocks_total - len(self._unused)

    def attach_prefix(self, sequence: TableSequence) -> None:
        """Shares every full block of the log that is already stored, leaving at least one token to compute."""
        log = sequence.log
        while (end := sequence.length + self.page) < len(log):
            block = self._found_by.get(log.digest_at(end))
            if block is None or self._slots[block] != log.token_ids[sequence.length : end]:
                return
            self._refer(block)
            sequence.blocks.append(block)
            sequence.length = end

    def reserve(self, sequence: TableSequence, rows: int) -> bool:
        """Room for `rows` behind the kept ones; False, and nothing changed, if there is none."""
        needed = -(-(sequence.length + rows) // self.page) - len(sequence.blocks)
        copy = self._tail_is_shared(sequence)
        if max(needed, 0) + copy > len(self._unused):
            return False
        if copy:
            self._copy_tail(sequence)
        for _ in range(needed):
            sequence.blocks.append(self._take())
        return True

    def write(self, sequence: TableSequence, rows: Sequence[int]) -> None:
        """Puts `rows` behind the kept ones. Raises ValueError if no room was reserved."""
        if sequence.length + len(rows) > len(sequence.blocks) * self.page:
            raise ValueError(f"{len(rows)} rows behind {sequence.length}: room was not reserved")
        for offset, token_id in enumerate(rows):
            self._put(sequence, sequence.length + offset, token_id)

    def read(self, sequence: TableSequence, start: int, stop: int) -> list[int]:
        return [self._slots[sequence.blocks[i // self.page]][i % self.page] for i in range(start, stop)]

    def keep(self, sequence: TableSequence, rows: Sequence[int]) -> None:
        """Moves the kept rows together, then frees what lies behind them."""
        kept = [self.read(sequence, sequence.length + row, sequence.length + row + 1)[0] for row in rows]
        for offset, token_id in enumerate(kept):
            self._put(sequence, sequence.length + offset, token_id)
        sequence.length += len(kept)
        sequence.parents = ()
        self._drop_behind(sequence)
        self._index(sequence)

    def truncate(self, sequence: TableSequence, length: int) -> None:
        sequence.length = min(sequence.length, length)
        sequence.parents = ()
        self._drop_behind(sequence)

    def release(self, sequence: TableSequence) -> None:
        self._index(sequence)
        self.truncate(sequence, 0)

    def check(self, sequences: Sequence[TableSequence]) -> None:
        """Raises RuntimeError unless the reference counts are those of `sequences`, and indexed blocks are whole."""
        counted = Counter(block for sequence in sequences for block in sequence.blocks)
        for block, references in enumerate(self._references):
            if counted[block] != references:
                raise RuntimeError(f"block {block}: {references} references counted, {counted[block]} held")
            if (references == 0) != (block in self._unused):
                raise RuntimeError(f"block {block} with {references} references is on the wrong side of the free list")
        for block in self._digest_of:
            if UNWRITTEN in self._slots[block]:
                raise RuntimeError(f"block {block} is findable but not fully written")

    def _put(self, sequence: TableSequence, slot: int, token_id: int) -> None:
        block = sequence.blocks[slot // self.page]
        if self._references[block] != 1:
            raise RuntimeError(f"block {block} is shared and must not be written")
        self._forget(block)
        self._slots[block][slot % self.page] = token_id

    def _index(self, sequence: TableSequence) -> None:
        """Makes blocks findable whose slots are all written *and* committed."""
        log, page = sequence.log, self.page
        for i in range(min(sequence.length, len(log)) // page):
            block, digest = sequence.blocks[i], log.digest_at((i + 1) * page)
            whole = self._slots[block] == log.token_ids[i * page : (i + 1) * page]
            if whole and block not in self._digest_of and digest not in self._found_by:
                self._digest_of[block], self._found_by[digest] = digest, block

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._found_by[digest]

    def _tail_is_shared(self, sequence: TableSequence) -> bool:
        first_written = sequence.length // self.page
        return first_written < len(sequence.blocks) and self._references[sequence.blocks[first_written]] > 1

    def _copy_tail(self, sequence: TableSequence) -> None:
        at = sequence.length // self.page
        block = self._take()
        self._slots[block] = list(self._slots[sequence.blocks[at]])
        self._drop(sequence.blocks[at])
        sequence.blocks[at] = block

    def _drop_behind(self, sequence: TableSequence) -> None:
        keep = -(-sequence.length // self.page)
        for block in sequence.blocks[keep:]:
            self._drop(block)
        del sequence.blocks[keep:]

    def _take(self) -> int:
        """The block idle for longest, blank ones first."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        self._slots[block] = [UNWRITTEN] * self.page
        self._references[block] = 1
        return block

    def _refer(self, block: int) -> None:
        self._references[block] += 1
        self._unused.pop(block, None)

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._unused[block] = None
            if block not in self._digest_of:
                self._unused.move_to_end(block, last=False)
