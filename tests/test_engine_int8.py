"""A target with weights of 8 bits: another model, but as exact as any target."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn

from services.deployment import Ports, RoleOverrides, plan
from services.settings import TargetSettings, UpSettings
from services.settings import load as load_settings
from services.target_process import announced_name
from specdec.candidates import CandidateTree
from specdec.engine import quantization
from specdec.engine.errors import ModelRefused
from specdec.engine.fused_linear import FusedLinear, LinearPart, fuse_linears
from specdec.engine.int8_linear import LEVELS, Int8Linear, can_round_to_int8
from specdec.engine.loading import load
from specdec.engine.model import Segment
from specdec.engine.quantization import Rounding, check_rounded, choose_rounding, round_runner
from specdec.engine.runner import ModelRunner
from specdec.log import Log
from tools.engine import draw_tokens, feed, feed_in_chunks, tiny_model, tiny_runner
from tools.real_grid import CELLS, cell_problems, run_grid
from tools.real_prompts import Prompt, own_prompts

TREE = CandidateTree((1, 2, 3, 4, 5, 6, 7), (-1, -1, 0, 0, 1, 2, 4))

pytestmark = pytest.mark.skipif(
    not can_round_to_int8(tiny_model("Llama", torch.bfloat16)), reason="this CPU multiplies no 8-bit integers exactly"
)


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)


def _rows(count: int, width: int) -> torch.Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    rows[3] *= 1000  # an outlier: with one scale for all rows it would leave nothing of the others
    return rows


def _rounded(kind: str) -> ModelRunner:
    runner = tiny_runner(tiny_model(kind, torch.bfloat16))
    round_runner(runner, Rounding.INT8)
    return runner


@pytest.fixture(scope="module", params=["Llama", "Qwen2"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return _rounded(request.param)


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(96, 64, True), (576, 1536, False), (1536, 577, True)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_in_company(inputs: int, outputs: int, bias: bool) -> None:
    linear, rows = Int8Linear(_linear(inputs, outputs, bias)), _rows(16, inputs)
    alone = torch.cat([linear(row[None]) for row in rows])
    assert torch.equal(linear(rows[:5]), alone[:5])
    assert torch.equal(linear(rows), alone)
    assert torch.equal(linear(rows.flip(0)), alone.flip(0))


@torch.inference_mode()
def test_it_computes_what_was_rounded() -> None:
    plain = _linear(96, 64, bias=True)
    linear, rows = Int8Linear(plain), _rows(16, 96)
    found = linear(rows).float()
    largest, scale = rows.float().abs().amax(1, keepdim=True), plain.weight.float().abs().amax(1) / LEVELS
    levels = (plain.weight.float() / scale[:, None]).round()
    expected = (rows.float() / largest * LEVELS).round() @ levels.T * scale * largest / LEVELS + plain.bias.float()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01 * largest.min().item())
    assert not torch.equal(linear(rows), plain(rows))


@torch.inference_mode()
def test_rows_of_zeros_and_rows_that_are_no_numbers_stay_alone() -> None:
    linear, rows = Int8Linear(_linear(96, 64)), _rows(4, 96)
    clean = linear(rows)
    rows[0], rows[1, 5], rows[2, 7] = 0, torch.nan, torch.inf
    found = linear(rows)
    assert torch.equal(found[0], torch.zeros(64))
    assert not torch.isfinite(found[1:3]).any()
    assert torch.equal(found[3], clean[3])


def test_chunks_and_trees_give_the_bits_of_one_prefill(runner: ModelRunner) -> None:
    token_ids = draw_tokens(150)
    whole = feed_in_chunks(runner, token_ids, 150)
    for chunk in (1, 2, 5, 6, 7, 16, 37):
        assert torch.equal(feed_in_chunks(runner, token_ids, chunk), whole), f"chunks of {chunk}"
    runner.open("tree", Log(b"tree"))
    feed(runner, "tree", token_ids[:60])
    assert runner.reserve("tree", len(TREE))
    [logits] = runner.forward([Segment("tree", TREE.token_ids, TREE.parents, len(TREE))])
    nodes = TREE.path(5)
    chain = feed_in_chunks(runner, [*token_ids[:60], *(TREE.token_ids[node] for node in nodes)], 60)
    assert torch.equal(logits[list(nodes)], chain[60:])
    runner.release("tree")


def test_a_model_that_has_computed_before_computes_with_the_rounded_weights_after() -> None:
    """In every layer, not in the output layer alone."""
    runner, token_ids = tiny_runner(tiny_model("Llama", torch.bfloat16)), draw_tokens(20)
    feed_in_chunks(runner, token_ids, 20)
    round_runner(runner, Rounding.INT8)
    after = feed_in_chunks(runner, token_ids, 20)
    assert torch.equal(after, feed_in_chunks(tiny_runner(runner.model), token_ids, 20))


def test_neighbours_change_no_bit_of_a_sequence(runner: ModelRunner) -> None:
    names = [f"sequence-{i}" for i in range(16)]
    for i, name in enumerate(names):
        runner.open(name, Log(name.encode()))
        feed(runner, name, draw_tokens(20 + i, seed=i))
        assert runner.reserve(name, 2)
    segments = [Segment(name, (i, i + 1), None, 2) for i, name in enumerate(names)]
    [alone] = runner.forward(segments[:1])
    assert torch.equal(runner.forward(segments[:5])[0], alone)
    assert torch.equal(runner.forward(segments)[0], alone)
    for name in names:
        runner.release(name)


def test_only_a_target_that_asks_for_it_is_rounded(tmp_path: Path) -> None:
    tiny_model("Llama").save_pretrained(tmp_path)
    target = load(tmp_path, dtype="bf16", kv_memory=2**24, quantization="int8")
    assert (target.dtype, target.packing.exact, target.numeric_noise) == ("int8", True, 0.0)
    assert load(tmp_path, dtype="bf16", kv_memory=2**24).dtype == "bfloat16"
    for wrong in ({"drafts": True}, {"dtype": "fp32"}):
        with pytest.raises(ValueError, match="quantization is int8, which needs a target alone in bf16 on a CPU"):
            load(tmp_path, **{"dtype": "bf16", "kv_memory": 2**24, "quantization": "int8", **wrong})  # type: ignore[arg-type]


def test_a_cpu_whose_products_overflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Llama", torch.bfloat16)
    assert choose_rounding("int8", model, drafts=False, ranks=1) is Rounding.INT8
    monkeypatch.setattr(Int8Linear, "forward", lambda self, rows: rows.new_full((len(rows), 16), 63.5))
    with pytest.raises(ValueError, match="multiplies 8-bit integers exactly"):
        choose_rounding("int8", model, drafts=False, ranks=1)


def test_a_model_that_rounding_spoils_is_refused() -> None:
    runner = tiny_runner(tiny_model("Llama", torch.bfloat16))
    before = quantization._probe_logits(runner)
    round_runner(runner, Rounding.INT8, self_test=False)
    check_rounded(runner, before)
    with pytest.raises(ModelRefused, match="tiny does not bear weights of 8 bits: its logits move by"):
        check_rounded(runner, before.roll(1, dims=0))


@torch.inference_mode()
def test_layers_of_a_group_compute_as_one_what_each_would() -> None:
    linears, rows = [_linear(96, size, bias=True) for size in (64, 32, 32)], _rows(4, 96)
    fused = FusedLinear(linears)
    parts = [LinearPart(fused, index) for index in range(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 2)):
        for index in order:
            torch.testing.assert_close(parts[index](rows), linears[index](rows))
    other = rows * 2
    torch.testing.assert_close(parts[0](rows), linears[0](rows))
    torch.testing.assert_close(parts[1](other), linears[1](other))


def test_only_layers_that_read_the_same_rows_are_fused() -> None:
    model = tiny_model("Qwen2")
    assert fuse_linears(model) == 2 * model.config.num_hidden_layers
    assert fuse_linears(tiny_model("Phi3")) == 0  # its layers are fused already


def test_rounded_weights_have_a_name_of_their_own(tmp_path: Path) -> None:
    up = load_settings(UpSettings, None, {"target_quantization": "int8"})
    [target] = plan(up, RoleOverrides.read(None), tmp_path, Ports(5, 6)).targets
    assert target.quantization == "int8"
    assert announced_name(target, tmp_path / "smollm2-135m") == "smollm2-135m-int8"
    assert announced_name(load_settings(TargetSettings).settings, tmp_path / "smollm2-135m") == "smollm2-135m"


def _check_any_drafter(rounded: ModelRunner, prompts: list[Prompt], tokens: int, share: int) -> None:
    """Greedy answers of every drafter and draft length are those of its own plain decoding."""
    grid = asyncio.run(run_grid(rounded, prompts, tokens=tokens, share=share))
    assert grid.violations == []
    assert {cell: problems for cell in grid.runs if (problems := cell_problems(grid, cell))} == {}
    assert len(grid.runs) >= len(CELLS) // 2


def test_a_target_says_the_same_with_any_drafter(runner: ModelRunner) -> None:
    prompts = [Prompt(f"prompt {seed}", tuple(draw_tokens(8, seed=seed) * 3)) for seed in range(3)]
    _check_any_drafter(runner, prompts, tokens=12, share=6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_target_says_the_same_with_any_drafter(smollm2: Path) -> None:
    rounded = load(smollm2, dtype="bf16", threads=2, kv_memory=2**30, max_context=1024, quantization="int8")
    _check_any_drafter(rounded, own_prompts(smollm2), tokens=24, share=4)
