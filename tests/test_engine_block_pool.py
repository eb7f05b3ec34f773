"""Blocks are counted right, and only what is written and committed is ever found again."""

from __future__ import annotations

import dataclasses

import pytest

from specdec.engine.block_pool import BlockPool, PoolCorrupt
from specdec.log import Log

PAGE = 4


def filled(pool: BlockPool, log: Log, count: int) -> list[int]:
    """A sequence that wrote and registered `count` full blocks of `log`."""
    blocks = pool.allocate(count)
    assert blocks is not None
    for i, block in enumerate(blocks):
        pool.register(block, log, i * PAGE)
    return blocks


def test_allocating_too_many_changes_nothing() -> None:
    pool = BlockPool(4, PAGE)
    held = pool.allocate(3)
    assert held is not None
    assert pool.allocate(2) is None
    assert (pool.used, pool.available) == (3, 1)
    pool.check_integrity([held])


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(4, PAGE)
    blocks = pool.allocate(4)
    assert blocks is not None
    assert 0 not in blocks


def test_a_committed_prefix_is_shared_and_outlives_its_sequence() -> None:
    pool = BlockPool(8, PAGE)
    log = Log(b"root", range(8))
    first = filled(pool, log, 2)
    shared = pool.acquire_prefix(Log(b"root", [*range(8), 99]), 2)
    assert shared == first
    assert pool.used == 2
    pool.check_integrity([first, shared])
    pool.release(first)
    pool.release(shared)
    assert pool.used == 0
    assert pool.acquire_prefix(log, 2) == first
    pool.check_integrity([first])


def test_a_prefix_ends_where_the_tokens_or_the_root_differ() -> None:
    pool = BlockPool(8, PAGE)
    blocks = filled(pool, Log(b"root", range(8)), 2)
    assert pool.acquire_prefix(Log(b"root", [0, 1, 2, 3, 4, 5, 6, 77]), 2) == blocks[:1]
    assert pool.acquire_prefix(Log(b"other tenant", range(8)), 2) == []


def test_an_equal_digest_over_other_tokens_is_no_hit() -> None:
    pool = BlockPool(8, PAGE)
    log = Log(b"root", range(4))
    [block] = filled(pool, log, 1)
    forged = Log(b"root", range(4))
    forged.token_ids[2] = 55  # the digests stay, as after a collision
    assert pool.acquire_prefix(forged, 1) == []
    assert pool.acquire_prefix(log, 1) == [block]


def test_the_oldest_idle_block_is_reused_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, PAGE)
    old, new = Log(b"old", range(8)), Log(b"new", range(8))
    for log in (old, new):
        pool.release(filled(pool, log, 2))
    taken = pool.allocate(1)
    assert taken is not None
    assert len(pool.acquire_prefix(new, 2)) == 2
    [head] = pool.acquire_prefix(old, 2)
    assert head not in taken


def test_a_written_block_is_forgotten() -> None:
    pool = BlockPool(4, PAGE)
    log = Log(b"root", range(4))
    [block] = filled(pool, log, 1)
    pool.forget(block)
    assert pool.acquire_prefix(log, 1) == []
    pool.release([block])
    pool.check_integrity([])


@pytest.mark.parametrize("fault", ["leak", "double", "foreign"])
def test_integrity_check_finds(fault: str) -> None:
    pool = BlockPool(4, PAGE)
    held = pool.allocate(2)
    assert held is not None
    tables = {"leak": [held[:1]], "double": [[*held, held[0]]], "foreign": [held, [4]]}[fault]
    with pytest.raises(PoolCorrupt):
        pool.check_integrity(tables)


def test_integrity_check_finds_an_index_that_names_another_block() -> None:
    pool = BlockPool(4, PAGE)
    blocks = filled(pool, Log(b"root", range(8)), 2)
    content = pool._content[blocks[0]]
    pool._content[blocks[0]] = dataclasses.replace(content, digest=b"x")
    with pytest.raises(PoolCorrupt, match="prefix index"):
        pool.check_integrity([blocks])
