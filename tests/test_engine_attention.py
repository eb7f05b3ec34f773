"""Both attention implementations compute causal attention over paged KV: windows, trees, long contexts, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.engine.layout import LARGE_KEYS, SMALL_KEYS, padded_keys
from specdec.engine.model import Segment
from specdec.engine.packing import LOOSE, PADDED, SINGLE
from specdec.engine.runner import ModelRunner
from specdec.log import Log
from tools.engine import draw_tokens, feed, feed_in_chunks, stock_logits, tiny_model, tiny_runner

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 20},
    "Gemma2": {"sliding_window": 20},
}


CASES = [(kind, name) for kind in KINDS for name in ("sdpa", "reference")] + [
    (kind, "compiled") for kind in ("Llama", "Qwen2")
]


@pytest.fixture(params=CASES, ids="-".join, scope="module")
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    kind, name = request.param
    return tiny_runner(tiny_model(kind, **KINDS[kind]), attention=name)


@pytest.mark.parametrize(("length", "chunk"), [(100, 100), (100, 7), (30, 1), (700, 300)])
def test_a_chain_agrees_with_the_stock_forward(runner: ModelRunner, length: int, chunk: int) -> None:
    token_ids = draw_tokens(length)
    ours = feed_in_chunks(runner, token_ids, chunk)
    torch.testing.assert_close(ours, stock_logits(runner, token_ids), atol=2e-4, rtol=1e-4)


def test_a_tree_beside_others_agrees_with_the_stock_forward(runner: ModelRunner) -> None:
    prefix, parents = draw_tokens(45), (-1, 0, 0, 2, -1, 4)
    tree = tuple(draw_tokens(len(parents), seed=1))
    runner.open("tree", Log(b"tree"))
    runner.open("other", Log(b"other"))
    feed(runner, "tree", prefix)
    assert runner.reserve("tree", len(tree))
    assert runner.reserve("other", 20)
    other = tuple(draw_tokens(20, seed=2))
    _, logits = runner.forward([Segment("other", other), Segment("tree", tree, parents, len(tree))])
    paths = {1: (0, 1), 3: (0, 2, 3), 5: (4, 5)}
    for leaf, path in paths.items():
        stock = stock_logits(runner, [*prefix, *(tree[i] for i in path)])
        torch.testing.assert_close(logits[leaf], stock[-1], atol=2e-4, rtol=1e-4)
    runner.release("tree")
    runner.release("other")


def test_the_two_implementations_agree() -> None:
    token_ids = draw_tokens(300)
    runners = [tiny_runner(tiny_model("Llama"), attention=name) for name in ("sdpa", "reference")]
    fused, plain = (feed_in_chunks(runner, token_ids, 70) for runner in runners)
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)


def test_padding_follows_the_rule_of_row_independence() -> None:
    assert [PADDED.rows(n) for n in (0, 1, 4, 5, 16, 17)] == [4, 4, 4, 8, 16, 20]
    assert [SINGLE.rows(n) for n in (0, 1, 4, 5, 16, 17)] == [4, 4, 4, 5, 16, 17]
    assert [LOOSE.rows(n) for n in (1, 2, 5)] == [1, 2, 5]
    keys = [1, SMALL_KEYS, SMALL_KEYS + 1, LARGE_KEYS, LARGE_KEYS + 1, 2 * LARGE_KEYS, 2 * LARGE_KEYS + 1]
    assert [padded_keys(n) for n in keys] == [64, 64, 128, 512, 1024, 1024, 1536]
