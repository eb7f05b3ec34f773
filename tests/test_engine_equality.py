"""A row's bits depend on its own sequence alone: not on its neighbours, nor on how its tokens were fed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.candidates import CandidateTree
from specdec.engine.exact_packing import COMPARED_ROWS, exact_packing
from specdec.engine.layout import ZERO_SLOT
from specdec.engine.loading import load
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.log import Log
from tools.engine import draw_tokens, feed, feed_in_chunks, stock_logits, tiny_model, tiny_runner

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TREE = CandidateTree((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (-1, -1, 0, 0, 1, 2, 4, 4, 5, 8, 9, 10))
"""Two roots, seven levels: it spans tiles and has a deep side branch."""
SLOW_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 20, 23, 24, 29, 31, 32, 33, 37, 40)


RUNNERS = ["Llama-fp32-compiled", "Qwen2-bf16-compiled", "Qwen2-bf16-tiled", "Llama-bf16-sdpa", "Qwen2-fp32-sdpa"]


@pytest.fixture(params=RUNNERS, scope="module")
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    kind, dtype, attention = request.param.split("-")
    runner = tiny_runner(tiny_model(kind, DTYPES[dtype]), attention=attention)
    runner.packing = exact_packing(runner, draw_tokens(COMPARED_ROWS))
    return runner


@pytest.fixture(params=["fp32", "bf16"], scope="module")
def real_runner(request: pytest.FixtureRequest, smollm2: Path) -> ModelRunner:
    return load(smollm2, dtype=request.param, threads=2, kv_memory=2**29, max_context=1024)


def check_chunks(runner: ModelRunner, length: int, chunks: tuple[int, ...], most: int = 12) -> None:
    """most: chunks of one size, so that small ones are tried on a start of the tokens."""
    token_ids = draw_tokens(length, vocabulary=runner.vocabulary_size)
    whole = feed_in_chunks(runner, token_ids, length)
    for chunk in chunks:
        count = min(length, max(chunk * most, 40))
        assert torch.equal(feed_in_chunks(runner, token_ids[:count], chunk), whole[:count]), f"chunks of {chunk}"


def check_tree(runner: ModelRunner, prefix_length: int) -> None:
    """Each node's logits are those of the chain that spells its path; so are rows after keeping a side branch."""
    prefix = draw_tokens(prefix_length, seed=3, vocabulary=runner.vocabulary_size)
    runner.open("tree", Log(b"tree"))
    feed(runner, "tree", prefix)
    assert runner.reserve("tree", len(TREE))
    [logits] = runner.forward([Segment("tree", TREE.token_ids, TREE.parents, len(TREE))])
    for leaf in set(range(len(TREE))) - set(TREE.parents):
        nodes = TREE.path(leaf)
        chain = [*prefix, *(TREE.token_ids[node] for node in nodes)]
        for node, row in zip(nodes, feed_in_chunks(runner, chain, len(chain))[prefix_length:], strict=True):
            assert torch.equal(logits[node], row), f"node {node}"
    kept = TREE.path(10)
    runner.keep("tree", kept)
    tail = draw_tokens(5, seed=4)
    after = feed(runner, "tree", tail)
    whole = [*prefix, *(TREE.token_ids[i] for i in kept), *tail]
    assert torch.equal(after, feed_in_chunks(runner, whole, len(whole))[-5:])
    runner.release("tree")
    runner.check_integrity()


def check_neighbours(runner: ModelRunner, lengths: tuple[int, ...]) -> None:
    """Plain steps, a verify chain, a tree and a prefill chunk in one forward each give what they give alone."""
    vocabulary = runner.vocabulary_size
    names = [f"sequence-{i}" for i in range(len(lengths))]
    shapes: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
        ((5,), None),
        (tuple(draw_tokens(6, seed=8)), None),
        (TREE.token_ids, TREE.parents),
        (tuple(draw_tokens(37, seed=9)), None),
    ]
    for i, (name, length) in enumerate(zip(names, lengths, strict=True)):
        runner.open(name, Log(name.encode()))
        feed(runner, name, draw_tokens(length, seed=i, vocabulary=vocabulary))
    segments = []
    for i, name in enumerate(names):
        token_ids, parents = shapes[i % len(shapes)]
        segments.append(Segment(name, token_ids, parents, len(token_ids)))
        assert runner.reserve(name, len(token_ids))
    alone = [runner.forward([segment])[0] for segment in segments]
    together = runner.forward(segments)
    backwards = runner.forward(segments[::-1])[::-1]
    for name, one, two, three in zip(names, alone, together, backwards, strict=True):
        assert torch.equal(one, two), name
        assert torch.equal(one, three), name
        runner.release(name)
    runner.check_integrity()


def test_chunks_give_the_bits_of_one_prefill(runner: ModelRunner) -> None:
    check_chunks(runner, 600, tuple(range(1, 41)))


@pytest.mark.parametrize("prefix_length", [1, 7, 60, 509])
def test_tree_rows_give_the_bits_of_a_chain(runner: ModelRunner, prefix_length: int) -> None:
    check_tree(runner, prefix_length)


def test_neighbours_change_no_bit(runner: ModelRunner) -> None:
    check_neighbours(runner, (5, 30, 61, 62, 63, 64, 90, 120, 200, 201, 250, 300, 3, 500, 510, 520))


def test_a_neighbour_that_is_not_a_number_stays_alone(runner: ModelRunner) -> None:
    """NaN in one sequence's KV reaches neither its neighbours nor whoever gets its blocks next."""
    token_ids = draw_tokens(30)
    clean = feed_in_chunks(runner, token_ids, 30)
    runner.open("bad", Log(b"bad"))
    feed(runner, "bad", draw_tokens(30, seed=5))
    bad = runner._sequences["bad"]
    runner._kv[:, :, torch.from_numpy(bad.slots)] = torch.nan
    runner.open("good", Log(b"good"))
    assert runner.reserve("bad", 2)
    assert runner.reserve("good", 30)
    poisoned, beside = runner.forward([Segment("bad", (1, 2), None, 2), Segment("good", tuple(token_ids), None, 30)])
    assert torch.isnan(poisoned).all()
    assert torch.equal(beside, clean)
    runner.release("good")
    runner.release("bad")
    runner.open("filler", Log(b"filler"))
    bad_blocks = len(bad.blocks)
    assert runner.reserve("filler", 16 * (runner.blocks_total - bad_blocks))  # only the bad ones are left
    assert torch.equal(feed_in_chunks(runner, token_ids, 30, "next"), clean)
    runner.release("filler")


def test_no_stale_slot_is_ever_read(runner: ModelRunner) -> None:
    """What earlier sequences left in the pool, however bad, reaches nobody: every slot but the zero one is NaN."""
    token_ids = draw_tokens(70)
    clean = feed_in_chunks(runner, token_ids, 70)
    runner._kv[:, :, ZERO_SLOT + 1 :] = torch.nan
    assert torch.equal(feed_in_chunks(runner, token_ids, 9), clean)
    runner._kv.zero_()


def test_every_thread_count_gives_the_same_bits(runner: ModelRunner) -> None:
    token_ids = draw_tokens(100)
    threads = torch.get_num_threads()
    both = []
    for count in (1, 2):
        torch.set_num_threads(count)
        both.append(feed_in_chunks(runner, token_ids, 13))
    torch.set_num_threads(threads)
    assert torch.equal(*both)


REAL: dict[str, Callable[[ModelRunner], None]] = {
    "chunks": lambda runner: check_chunks(runner, 100, (1, 3, 8, 40)),
    "tree": lambda runner: check_tree(runner, 60),
    "neighbours": lambda runner: check_neighbours(runner, (5, 30, 61, 62, 120, 200)),
}


@pytest.mark.parametrize("check", REAL)
def test_a_real_model_keeps_the_promise(real_runner: ModelRunner, check: str) -> None:
    REAL[check](real_runner)


@pytest.mark.slow
def test_a_real_model_keeps_it_for_every_chunk_and_over_long_contexts(real_runner: ModelRunner) -> None:
    check_chunks(real_runner, 160, (1, 2, 3, 5, 8, 13, 17, 40), most=24)
    check_chunks(real_runner, 600, (40, 256))
    check_chunks(real_runner, 800, SLOW_CHUNKS, most=24)


def test_a_real_model_agrees_with_its_stock_forward(real_runner: ModelRunner) -> None:
    token_ids = draw_tokens(120, vocabulary=real_runner.vocabulary_size)
    ours = feed_in_chunks(real_runner, token_ids, 50)
    stock = stock_logits(real_runner, token_ids)
    if real_runner.dtype == "float32":
        torch.testing.assert_close(ours, stock, atol=2e-4, rtol=0)
    else:
        assert ((ours - stock).abs().mean() / stock.std()).item() < 0.1
