"""What every language model behind the seam keeps: the rules that the worker loops build on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from specdec.candidates import CandidateTree
from specdec.digest import root_digest
from specdec.engine.model import LanguageModel, Segment
from specdec.log import Log
from tools.engine import tiny_model, tiny_runner
from tools.table_model import TableModel

MakeModel = Callable[[int | None], LanguageModel]
PROMPT = [5, 9, 2, 7, 7, 1, 30, 12, 4, 4, 19, 8, 3, 22, 17, 6, 11, 2, 9, 5, 1, 13]


def table_model(blocks: int | None) -> LanguageModel:
    return TableModel(blocks_total=blocks or 256)


BLOCK_BYTES = 2 * 3 * 16 * 2 * 16 * 4
"""K and V of three layers: 16 slots, 2 heads of 16 values of 4 bytes."""


@cache
def tiny_llama() -> object:
    return tiny_model("Llama", num_attention_heads=4)


def tiny(attention: str, blocks: int) -> LanguageModel:
    return tiny_runner(tiny_llama(), kv_memory=blocks * BLOCK_BYTES, attention=attention, max_context=blocks * 16)


def model_runner(blocks: int | None) -> LanguageModel:
    return tiny("sdpa", blocks or 48)


def reference_runner(blocks: int | None) -> LanguageModel:
    return tiny("reference", blocks or 48)


MODELS: dict[str, MakeModel] = {"table": table_model, "sdpa": model_runner, "reference": reference_runner}


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def make_model(request: pytest.FixtureRequest) -> MakeModel:
    maker: MakeModel = request.param
    return maker


def new_log(token_ids: list[int]) -> Log:
    return Log(root_digest(b"", "test"), token_ids)


def run(model: LanguageModel, sequence_id: str, token_ids: list[int], num_logits: int = 1) -> torch.Tensor:
    """Runs a chain and keeps all of it."""
    assert model.reserve(sequence_id, len(token_ids))
    (logits,) = model.forward([Segment(sequence_id, tuple(token_ids), num_logits=num_logits)])
    model.keep(sequence_id, range(len(token_ids)))
    return logits


def fresh_logits(make_model: MakeModel, token_ids: list[int]) -> torch.Tensor:
    """The last row's logits, by a model that has seen nothing else."""
    model = make_model(None)
    model.open("fresh", new_log(token_ids))
    return run(model, "fresh", token_ids)


def test_logits_have_the_shape_and_type_that_the_seam_promises(make_model: MakeModel) -> None:
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    logits = run(model, "a", PROMPT, num_logits=3)
    assert logits.shape == (3, model.vocabulary_size)
    assert logits.dtype == torch.float32


def test_a_prefill_chunk_may_want_no_logits(make_model: MakeModel) -> None:
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    assert run(model, "a", PROMPT[:-1], num_logits=0).shape == (0, model.vocabulary_size)
    assert torch.equal(run(model, "a", PROMPT[-1:]), fresh_logits(make_model, PROMPT))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 21])
def test_chunked_prefill_gives_the_bits_of_whole_prefill(make_model: MakeModel, chunk: int) -> None:
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    for start in range(0, len(PROMPT), chunk):
        logits = run(model, "a", PROMPT[start : start + chunk])
    assert model.kv_length("a") == len(PROMPT)
    assert torch.equal(logits, fresh_logits(make_model, PROMPT))


def test_every_row_of_a_chain_is_what_a_plain_step_gives(make_model: MakeModel) -> None:
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    rows = run(model, "a", PROMPT, num_logits=6)
    for back in range(6):
        assert torch.equal(rows[-1 - back], fresh_logits(make_model, PROMPT[: len(PROMPT) - back])[0])


def test_every_tree_node_is_what_its_path_gives_as_a_chain(make_model: MakeModel) -> None:
    tree = CandidateTree((3, 8, 8, 1, 2, 3, 6), (-1, -1, 0, 0, 1, 2, 5))
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    run(model, "a", PROMPT[:-1])
    # The committed token without KV is the root row; the candidates hang below it.
    ids = (PROMPT[-1], *tree.token_ids)
    parents = (-1, *(p + 1 for p in tree.parents))
    assert model.reserve("a", len(ids))
    (rows,) = model.forward([Segment("a", ids, parents, num_logits=len(ids))])
    for node in range(len(tree)):
        path = [tree.token_ids[i] for i in tree.path(node)]
        assert torch.equal(rows[node + 1], fresh_logits(make_model, PROMPT + path)[0])


@pytest.mark.parametrize("kept", [(), (0,), (0, 2), (0, 2, 4), (1,), (1, 3)])
def test_after_a_tree_only_the_kept_path_remains(make_model: MakeModel, kept: tuple[int, ...]) -> None:
    ids, parents = (3, 8, 8, 1, 2), (-1, -1, 0, 1, 2)
    model = make_model(None)
    log = new_log(PROMPT)
    model.open("a", log)
    run(model, "a", PROMPT)
    assert model.reserve("a", len(ids))
    model.forward([Segment("a", ids, parents, num_logits=1)])
    model.keep("a", kept)
    path = [ids[i] for i in kept]
    log.append([*path, 29])
    assert model.kv_length("a") == len(PROMPT) + len(path)
    assert torch.equal(run(model, "a", [29]), fresh_logits(make_model, [*PROMPT, *path, 29]))


def test_rejected_rows_leave_no_trace_over_many_rounds(make_model: MakeModel) -> None:
    model = make_model(None)
    log = new_log(PROMPT[:3])
    model.open("a", log)
    run(model, "a", PROMPT[:3])
    used = model.blocks_used
    for accepted, token_id in enumerate(PROMPT[3:]):
        assert model.reserve("a", 7)
        model.forward([Segment("a", (token_id, 31, 30, 29, 28, 27, 26), num_logits=7)])
        model.keep("a", [0])
        log.append([token_id])
        assert model.kv_length("a") == 4 + accepted
        assert model.blocks_used <= used + len(PROMPT)
    assert torch.equal(run(model, "a", [23]), fresh_logits(make_model, [*PROMPT, 23]))


@pytest.mark.parametrize("length", [0, 1, 4, 7, 15, 16, 17, 21, 22])
def test_truncate_rolls_back_to_a_length(make_model: MakeModel, length: int) -> None:
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    run(model, "a", PROMPT)
    model.truncate("a", length)
    assert model.kv_length("a") == length
    assert torch.equal(run(model, "a", [31]), fresh_logits(make_model, [*PROMPT[:length], 31]))


def test_truncate_beyond_the_kv_changes_nothing(make_model: MakeModel) -> None:
    model = make_model(None)
    model.open("a", new_log(PROMPT))
    run(model, "a", PROMPT[:5])
    model.truncate("a", 9)
    assert model.kv_length("a") == 5


def test_neighbours_in_one_forward_do_not_change_a_row(make_model: MakeModel) -> None:
    model = make_model(None)
    prompts = {"a": PROMPT, "b": [31] * 9, "c": [1], "d": PROMPT[3:14]}
    for sequence_id, token_ids in prompts.items():
        model.open(sequence_id, new_log(token_ids))
        assert model.reserve(sequence_id, len(token_ids))
    segments = [Segment(sequence_id, tuple(token_ids)) for sequence_id, token_ids in prompts.items()]
    for token_ids, logits in zip(prompts.values(), model.forward(segments), strict=True):
        assert torch.equal(logits, fresh_logits(make_model, token_ids))


def test_release_frees_everything(make_model: MakeModel) -> None:
    model = make_model(None)
    for sequence_id in "abc":
        model.open(sequence_id, new_log(PROMPT))
        run(model, sequence_id, PROMPT[model.kv_length(sequence_id) :])
    assert model.reserve("a", 40)
    assert model.blocks_used > 0
    for sequence_id in ["a", "b", "c", "c", "never opened"]:
        model.release(sequence_id)
    assert model.blocks_used == 0


def test_a_failed_reserve_changes_nothing(make_model: MakeModel) -> None:
    model = make_model(8)
    model.open("a", new_log(PROMPT))
    run(model, "a", PROMPT)
    used = model.blocks_used
    assert not model.reserve("a", 10_000)
    assert (model.blocks_used, model.kv_length("a")) == (used, len(PROMPT))
    assert torch.equal(run(model, "a", [31]), fresh_logits(make_model, [*PROMPT, 31]))


def test_room_that_was_released_can_be_reserved_again(make_model: MakeModel) -> None:
    model = make_model(8)
    for turn in range(50):
        token_ids = [(turn + i) % 32 for i in range(20)]
        model.open(f"s{turn}", new_log(token_ids))
        logits = run(model, f"s{turn}", token_ids[model.kv_length(f"s{turn}") :])
        assert torch.equal(logits, fresh_logits(make_model, token_ids))
        model.release(f"s{turn}")
    assert model.blocks_used == 0


def test_a_shared_prefix_saves_work_and_changes_no_bit(make_model: MakeModel) -> None:
    model = make_model(None)
    prompt = PROMPT * 2
    assert model.open("a", new_log(prompt)) == 0
    run(model, "a", prompt)
    for other in (prompt, [*prompt[:-2], 31, 31], prompt[:33]):
        cached = model.open("b", new_log(other))
        assert cached == model.kv_length("b") <= len(other) - 1
        assert torch.equal(run(model, "b", other[cached:]), fresh_logits(make_model, other))
        model.release("b")
    assert torch.equal(run(model, "a", [31]), fresh_logits(make_model, [*prompt, 31]))


def test_sharers_of_a_prefix_can_roll_back_without_hurting_each_other(make_model: MakeModel) -> None:
    model = make_model(None)
    prompt = PROMPT * 2
    model.open("a", new_log(prompt))
    run(model, "a", prompt)
    cached = model.open("b", new_log(prompt))
    model.truncate("b", max(cached - 3, 0))
    length = model.kv_length("b")
    assert torch.equal(run(model, "b", [31, 30]), fresh_logits(make_model, [*prompt[:length], 31, 30]))
    model.truncate("a", len(prompt) - 1)
    assert torch.equal(run(model, "a", prompt[-1:]), fresh_logits(make_model, prompt))


def test_uncommitted_rows_are_not_found_by_others(make_model: MakeModel) -> None:
    """A block is shared only when all its slots are written and committed."""
    model = make_model(None)
    candidates = [31, 30, 29, 28, 27, 26, 25, 24, 23, 22] * 3
    model.open("a", new_log(PROMPT))
    run(model, "a", PROMPT)
    assert model.reserve("a", len(candidates))
    model.forward([Segment("a", tuple(candidates))])
    cached = model.open("b", new_log([*PROMPT, *candidates, 1]))
    assert cached <= len(PROMPT)
    assert torch.equal(
        run(model, "b", [*PROMPT, *candidates, 1][cached:]), fresh_logits(make_model, [*PROMPT, *candidates, 1])
    )
