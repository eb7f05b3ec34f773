"""What CUDA forwards are made of, on the CPU: block tables, the call of varlen attention, graph buckets and padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from specdec.engine.graphs import Bucket, Capture, Recording, bucket_of
from specdec.engine.layout import TRASH_SLOT, SequenceRows
from specdec.engine.loading import build_runner
from specdec.engine.model import Segment
from specdec.engine.page_tables import TableShape, pack_chains, unpack
from specdec.engine.runner import ModelRunner
from specdec.engine.varlen import REFERENCE, HeadShape, PagedAttention, reason_against, varlen_reference
from specdec.log import Log
from tools.engine import draw_tokens, feed, feed_in_chunks, stock_logits, tiny_model, tiny_runner
from tools.no_waiting import NoWaiting

PAGE = 16
SHAPE = HeadShape(heads=4, kv_heads=2, dim=8, dtype=torch.float32)


class FakeCapture:
    """Plays by running anew. Like a graph, it calls no Python of its own before `replay` and keeps its output where it
    is."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> Recording:
        self.captures += 1
        output = torch.full_like(run(), torch.nan)  # a capture computes nothing

        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return Recording(replay, output)


def chain_runner(kind: str = "Llama", capture: Capture | None = None, **changes: Any) -> ModelRunner:
    model = tiny_model(kind, **changes)
    size = model.config.vocab_size
    return ModelRunner(
        model, name="tiny", vocabulary_size=size, context_length=768, kv_blocks=120, paged=REFERENCE, capture=capture
    )


@pytest.fixture(params=[("Llama", {}), ("Mistral", {"sliding_window": 20})], ids=["full", "window"])
def kind(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    chosen: tuple[str, dict[str, Any]] = request.param
    return chosen


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graphs"])
def test_chains_over_block_tables_agree_with_stock_and_gather(kind: tuple[str, dict[str, Any]], captures: bool) -> None:
    name, changes = kind
    token_ids = draw_tokens(70)
    runner = chain_runner(name, FakeCapture() if captures else None, **changes)
    gathered = feed_in_chunks(tiny_runner(tiny_model(name, **changes), attention="sdpa"), token_ids, 7)
    for chunk in (70, 7, 5):
        ours = feed_in_chunks(runner, token_ids, chunk)
        torch.testing.assert_close(ours, gathered, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(ours, stock_logits(runner, token_ids), atol=2e-4, rtol=1e-4)


def test_a_replay_holds_any_batch_of_its_bucket() -> None:
    """Padding entries, uncovered rows and other sequences' stale numbers in the buffer change no row."""
    capture = FakeCapture()
    runner, eager = chain_runner(capture=capture), chain_runner()
    logs = {f"s{i}": draw_tokens(10 + 9 * i, seed=i) for i in range(4)}
    for one in (runner, eager):
        for name, token_ids in logs.items():
            one.open(name, Log(name.encode()))
            feed(one, name, token_ids)
    captured = capture.captures
    batches = [{"s0": 4, "s1": 2, "s2": 3, "s3": 4}, {"s1": 3, "s3": 3, "s0": 1}, {"s2": 4, "s3": 1, "s1": 1, "s0": 1}]
    for batch in batches:
        segments = [Segment(name, tuple(draw_tokens(n, seed=n)), None, n) for name, n in batch.items()]
        for one in (runner, eager):
            assert all(one.reserve(segment.sequence_id, len(segment.token_ids)) for segment in segments)
        for ours, plain in zip(runner.forward(segments), eager.forward(segments), strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)
        for one in (runner, eager):
            for segment in segments:
                one.keep(segment.sequence_id, [0])
    assert capture.captures == captured + 1  # one bucket, (4, 4), captured when it was first met
    assert runner.layers_called == [0, 1, 2]


def test_logits_outlive_the_next_replay() -> None:
    runner = chain_runner(capture=FakeCapture())
    runner.open("s", Log(b"s"))
    first = feed(runner, "s", [5])
    kept = first.clone()
    feed(runner, "s", [9])
    assert torch.equal(first, kept)


def test_a_tree_takes_the_gather_and_its_kept_path_goes_on_over_block_tables() -> None:
    runner, gathered = chain_runner(capture=FakeCapture()), tiny_runner(tiny_model("Llama"), attention="sdpa")
    parents, tree = (-1, -1, 1, 2), tuple(draw_tokens(4, seed=3))
    found = []
    for one in (runner, gathered):
        one.open("t", Log(b"t"))
        feed(one, "t", draw_tokens(30))
        assert one.reserve("t", 4)
        [logits] = one.forward([Segment("t", tree, parents, 4)])
        one.keep("t", [1, 2])
        found.append(torch.cat((logits, feed(one, "t", [7, 8]))))
    torch.testing.assert_close(found[0], found[1], atol=2e-4, rtol=1e-4)


def test_a_capture_that_fails_leaves_an_eager_runner() -> None:
    def refuse(run: Callable[[], torch.Tensor]) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = chain_runner(capture=refuse)
    token_ids = draw_tokens(12)
    torch.testing.assert_close(
        feed_in_chunks(runner, token_ids, 3), stock_logits(runner, token_ids), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("sequences", "rows", "bucket"),
    [(1, 1, (1, 1)), (3, 5, (4, 6)), (33, 6, (64, 6)), (64, 8, (64, 8)), (64, 9, None), (65, 1, None), (1, 17, None)],
)
def test_buckets(sequences: int, rows: int, bucket: tuple[int, int] | None) -> None:
    assert bucket_of(sequences, rows) == (None if bucket is None else Bucket(*bucket))


def test_tables_tell_entries_padding_and_pages() -> None:
    import numpy as np

    slots = np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in (5, 2)])
    sequences = [SequenceRows((7, 8, 9), None, 15, slots), SequenceRows((4,), None, 0, slots[16:])]
    shape = TableShape(rows=8, entries=3, pages=4, most_rows=4, most_keys=64)
    layout = unpack(torch.from_numpy(pack_chains(sequences, [2, 3], shape, PAGE)), shape)
    assert layout.token_ids.tolist() == [[7, 8, 9, 4, 0, 0, 0, 0]]
    assert layout.positions[0, :4].tolist() == [15, 16, 17, 0]
    assert layout.write_slots.tolist() == [95, 32, 33, 32] + [TRASH_SLOT] * 4
    assert layout.wanted.tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    tables = layout.tables
    assert tables.query_starts.tolist() == [0, 3, 4, 5]
    assert tables.key_lengths.tolist() == [18, 1, 1]
    assert tables.key_starts.tolist() == [0, 18, 19, 20]
    assert tables.pages.tolist() == [[5, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert {t.dtype for t in (tables.query_starts, tables.key_lengths, tables.key_starts, tables.pages)} == {
        torch.int32
    }


def test_the_call_fits_the_signature_of_this_torch() -> None:
    """Every argument is one of `varlen_attn`'s, by position or name, and those that a wrong result hangs on are set."""
    seen: dict[str, Any] = {}

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.update(inspect.signature(varlen_attn).bind(*args, **kwargs).arguments)
        return varlen_reference(*args, **kwargs)

    assert reason_against(PagedAttention(recorded, False), torch.device("cpu"), SHAPE, PAGE) is None
    assert seen["num_splits"] == 1
    assert seen["cu_seq_k"] is None
    assert seen["window_size"] == (6, 0)
    assert seen["enable_gqa"] is True
    assert seen["block_table"].dtype == torch.int32


def wrong_alignment(*args: Any, **kwargs: Any) -> torch.Tensor:
    return varlen_reference(*args, **{**kwargs, "window_size": (-1, -1)})


def wrong_window(*args: Any, **kwargs: Any) -> torch.Tensor:
    left, right = kwargs["window_size"]
    return varlen_reference(*args, **{**kwargs, "window_size": (left + 1 if left >= 0 else left, right)})


def unwritten_rows(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What splitting did: only the first entry's rows are written."""
    output = varlen_reference(*args, **kwargs)
    output[args[5] :] = torch.nan
    return output


def refuses(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("block_table is not supported\nmore")


@pytest.mark.parametrize("broken", [wrong_alignment, wrong_window, unwritten_rows, refuses])
def test_the_probe_finds_a_kernel_that_computes_something_else(broken: Callable[..., torch.Tensor]) -> None:
    reason = reason_against(PagedAttention(broken, True), torch.device("cpu"), SHAPE, PAGE)
    assert reason is not None
    assert "\n" not in reason


def test_the_cpu_build_has_no_such_kernel_and_the_probe_says_so() -> None:
    from specdec.engine.varlen import find_varlen

    assert find_varlen(torch.device("cpu"), SHAPE, PAGE) is None


def test_varlen_is_refused_where_it_does_not_work() -> None:
    with pytest.raises(ValueError, match="attention is varlen, which does not work here on cpu"):
        build_runner(tiny_model("Llama"), name="tiny", implementation="varlen", max_context=256)


@pytest.fixture
def unmasked() -> PagedAttention:
    """Attention that reads nothing back, unlike the reference."""
    return PagedAttention(lambda query, *_, **__: query, True)


def test_nothing_in_a_captured_forward_waits_for_the_device(unmasked: PagedAttention) -> None:
    def watched(run: Callable[[], torch.Tensor]) -> Recording:
        with NoWaiting():  # type: ignore[no-untyped-call]
            return Recording(run, run())

    runner = chain_runner(capture=watched)
    runner._chains._attend = unmasked  # type: ignore[union-attr]
    runner.open("s", Log(b"s"))
    feed(runner, "s", [5, 6])
    assert runner._chains is not None
    assert runner._chains.buckets == [Bucket(1, 2)]
