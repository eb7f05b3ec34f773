"""The runner keeps, rolls back, shares, refuses and frees KV as the seam promises."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.log import Log
from tools.engine import draw_tokens, feed, feed_in_chunks, tiny_model, tiny_runner

PAGE = 16
BYTES_PER_BLOCK = 3 * 2 * 2 * 16 * 4 * PAGE


@pytest.fixture
def runner() -> ModelRunner:
    return tiny_runner(tiny_model("Llama"), kv_memory=24 * BYTES_PER_BLOCK, max_context=24 * PAGE)


def last_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    return feed_in_chunks(runner, token_ids, len(token_ids), "fresh")[-1]


def test_rejected_rows_leave_no_trace(runner: ModelRunner) -> None:
    """200 rounds of verify with a rejection at every depth: the last logits are those of a fresh sequence."""
    draw = random.Random(0)
    kept = draw_tokens(3)
    log = Log(b"root", kept)
    runner.open("a", log)
    feed(runner, "a", kept)
    for _ in range(200):
        rows = [draw.randrange(160) for _ in range(draw.randrange(1, 9))]
        accepted = draw.randrange(0, len(rows) + 1) if len(kept) < 300 else 0
        assert runner.reserve("a", len(rows))
        runner.forward([Segment("a", tuple(rows), None, len(rows))])
        runner.keep("a", range(accepted))
        kept += rows[:accepted]
        log.append(rows[:accepted])
        assert runner.kv_length("a") == len(kept)
        runner.check_integrity()
    assert torch.equal(feed(runner, "a", [7])[-1], feed_in_chunks(tiny_runner(runner.model), [*kept, 7], 400)[-1])


def test_rows_run_but_not_kept_are_gone(runner: ModelRunner) -> None:
    token_ids = draw_tokens(20)
    runner.open("a", Log(b"a"))
    feed(runner, "a", token_ids)
    assert runner.reserve("a", 4)
    runner.forward([Segment("a", (1, 2, 3, 4))])
    runner.forward([Segment("a", (5, 6, 7))])
    runner.keep("a", [0])
    assert runner.kv_length("a") == 21
    assert torch.equal(feed(runner, "a", [9])[-1], last_logits(runner, [*token_ids, 5, 9]))


def test_truncating_rolls_back_and_frees(runner: ModelRunner) -> None:
    token_ids = draw_tokens(70)
    runner.open("a", Log(b"a", token_ids))
    feed(runner, "a", token_ids)
    runner.truncate("a", 100)
    assert runner.kv_length("a") == 70
    runner.truncate("a", 37)
    assert (runner.kv_length("a"), runner.blocks_used) == (37, 3)
    other = [(token + 1) % 160 for token in token_ids[37:60]]
    assert torch.equal(feed(runner, "a", other)[-1], last_logits(runner, token_ids[:37] + other))
    runner.check_integrity()


def test_a_reserve_without_room_changes_nothing(runner: ModelRunner) -> None:
    runner.open("a", Log(b"a"))
    feed(runner, "a", draw_tokens(20 * PAGE))
    runner.open("b", Log(b"b"))
    assert runner.blocks_total == 24
    assert not runner.reserve("b", 4 * PAGE + 1)
    assert (runner.blocks_used, runner.kv_length("b")) == (20, 0)
    assert runner.reserve("b", 4 * PAGE)
    runner.release("a")
    runner.release("a")
    assert runner.blocks_used == 4
    runner.check_integrity()


def test_a_committed_prefix_is_found_and_gives_the_same_bits(runner: ModelRunner) -> None:
    token_ids = draw_tokens(50)
    first = Log(b"root", token_ids)
    assert runner.open("a", first) == 0
    whole = feed(runner, "a", token_ids)
    runner.release("a")
    assert runner.open("b", Log(b"root", token_ids)) == 48
    assert torch.equal(feed(runner, "b", token_ids[48:]), whole[48:])
    assert runner.open("other tenant", Log(b"salted root", token_ids)) == 0
    assert runner.open("c", Log(b"root", token_ids[:32])) == 16  # the last token's logits are needed
    runner.check_integrity()


def test_only_written_and_committed_blocks_are_found(runner: ModelRunner) -> None:
    token_ids = draw_tokens(48)
    log = Log(b"root", token_ids[:40])  # committed beyond what is written, then written beyond what is committed
    runner.open("a", log)
    feed(runner, "a", token_ids[:30])
    assert runner.open("b", Log(b"root", token_ids)) == 16
    feed(runner, "a", token_ids[30:])
    assert runner.open("c", Log(b"root", [*token_ids, 1])) == 32
    log.append(token_ids[40:])
    runner.release("a")
    assert runner.open("d", Log(b"root", [*token_ids, 1])) == 48
    runner.check_integrity()


def test_a_log_that_went_another_way_does_not_name_old_kv(runner: ModelRunner) -> None:
    """A draft worker's log rolls back and grows again before its KV is realigned."""
    token_ids = draw_tokens(16)
    log = Log(b"root", token_ids[:12])
    runner.open("a", log)
    feed(runner, "a", token_ids)
    log.append([(token + 1) % 160 for token in token_ids[12:]])
    runner.reserve("a", 1)
    assert runner.open("b", Log(b"root", [*log.token_ids, 1])) == 0


def test_rolling_back_into_a_shared_block_spares_the_other_reader(runner: ModelRunner) -> None:
    token_ids = draw_tokens(33)
    runner.open("a", Log(b"root", token_ids))
    whole = feed(runner, "a", token_ids)
    runner.open("b", Log(b"root", token_ids))
    runner.truncate("b", 20)
    feed(runner, "b", [3, 4, 5])
    runner.truncate("a", 32)
    assert torch.equal(feed(runner, "a", token_ids[32:]), whole[32:])
    assert runner.open("c", Log(b"root", token_ids)) == 32
    runner.check_integrity()


def test_kv_that_is_overwritten_is_not_found_again(runner: ModelRunner) -> None:
    token_ids = draw_tokens(17)
    log = Log(b"root", token_ids)
    runner.open("a", log)
    feed(runner, "a", token_ids)
    runner.truncate("a", 10)
    log.roll_back(10)
    log.append([9] * 10)
    feed(runner, "a", [9] * 10)
    assert runner.open("b", Log(b"root", token_ids)) == 0
    runner.check_integrity()


def test_wrong_use_is_named(runner: ModelRunner) -> None:
    runner.open("a", Log(b"a"))
    with pytest.raises(ValueError, match="open already"):
        runner.open("a", Log(b"a"))
    with pytest.raises(ValueError, match="not reserved"):
        runner.forward([Segment("a", (1,))])
    with pytest.raises(ValueError, match="at least one row"):
        runner.forward([Segment("a", ())])
    assert runner.reserve("a", 3)
    runner.forward([Segment("a", (1, 2, 3), (-1, -1, 0))])
    with pytest.raises(ValueError, match="no path"):
        runner.keep("a", [1, 2])
    with pytest.raises(ValueError, match="no rows to keep"):
        runner.keep("a", [0])


def test_logits_cover_the_real_vocabulary_only() -> None:
    model = tiny_model("Llama")
    runner = tiny_runner(model)
    runner.vocabulary_size = 100
    runner.open("a", Log(b"a"))
    assert runner.reserve("a", 5)
    [logits] = runner.forward([Segment("a", (1, 2, 3, 4, 5), None, 2)])
    assert logits.shape == (2, 100)
    assert logits.dtype == torch.float32
