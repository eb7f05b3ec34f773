"""KV blocks: who holds which, and which full committed prefixes can be found again.

A *block* holds the KV of `page_size` consecutive tokens. It is in exactly one state: *free* (content worthless), *used*
(referenced by one or more sequences) or *idle* (referenced by none, but findable in the prefix index until reused).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.log import Log

RESERVED_BLOCKS = 1
"""Block 0 is never handed out: its first slot stays zero and pads gathers, its second takes the padding rows' KV."""


class PoolCorrupt(Exception):
    """The pool's books contradict each other: a fault of the engine."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What an indexed block holds: `token_ids` behind the prefix `parent_digest`; `digest` is at its last token."""

    parent_digest: bytes
    digest: bytes
    token_ids: tuple[int, ...]


class BlockPool:
    """Blocks with reference counts, and a prefix index by chained digest *and* tokens. Oldest idle block goes first."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self._references = [0] * (total + RESERVED_BLOCKS)
        self._free: deque[int] = deque(range(RESERVED_BLOCKS, total + RESERVED_BLOCKS))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each; None (and nothing changes) if so many are not available."""
        if count > self.available:
            return None
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def acquire_prefix(self, log: Log, max_blocks: int) -> list[int]:
        """Takes references to the cached blocks that hold the start of `log`, at most `max_blocks`, in order."""
        blocks: list[int] = []
        for block in self._find_prefix(log, max_blocks):
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def _find_prefix(self, log: Log, max_blocks: int) -> Iterator[int]:
        for start in range(0, max_blocks * self.page_size, self.page_size):
            wanted = self._describe(log, start)
            block = self._by_digest.get(wanted.digest)
            # A digest is not proof: the tokens are compared too, block by block from the start.
            if block is None or self._content[block] != wanted:
                return
            yield block

    def _describe(self, log: Log, start: int) -> CachedBlock:
        end = start + self.page_size
        return CachedBlock(log.digest_at(start), log.digest_at(end), tuple(log.token_ids[start:end]))

    def register(self, block: int, log: Log, start: int) -> None:
        """Makes a used block findable: all its slots are written and committed, from token `start` of `log`.

        A prefix that another block already holds stays with that one.
        """
        content = self._describe(log, start)
        if block in self._content or content.digest in self._by_digest:
            return
        self._content[block] = content
        self._by_digest[content.digest] = block

    def forget(self, block: int) -> None:
        """Takes the block out of the prefix index, because it is about to be written."""
        content = self._content.pop(block, None)
        if content is not None:
            del self._by_digest[content.digest]

    def is_registered(self, block: int) -> bool:
        return block in self._content

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each. The last ones are reused first, since a prefix is only found from its start."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._content:
                self._idle[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Compares the books with the block tables of all sequences. Raises `PoolCorrupt` naming the first fault."""
        counts = [0] * len(self._references)
        for table in held:
            if len(set(table)) != len(table):
                raise PoolCorrupt(f"a sequence holds a block twice: {list(table)}")
            for block in table:
                counts[block] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolCorrupt("a block is free twice")
        for block in range(RESERVED_BLOCKS, len(counts)):
            self._check_block(block, counts[block], block in free)
        if any(counts[:RESERVED_BLOCKS]) or free & set(range(RESERVED_BLOCKS)):
            raise PoolCorrupt("a reserved block is in use")
        if {content.digest: block for block, content in self._content.items()} != self._by_digest:
            raise PoolCorrupt("the prefix index names other blocks than the blocks' own contents")

    def _check_block(self, block: int, count: int, is_free: bool) -> None:
        if self._references[block] != count:
            raise PoolCorrupt(f"block {block} counts {self._references[block]} references, sequences hold {count}")
        states = (count > 0) + is_free + (block in self._idle)
        if states != 1:
            raise PoolCorrupt(f"block {block} is in {states} of the states used, free, idle")
        if (block in self._idle) and block not in self._content:
            raise PoolCorrupt(f"block {block} is idle but cannot be found")
        if is_free and block in self._content:
            raise PoolCorrupt(f"block {block} is free but in the prefix index")
