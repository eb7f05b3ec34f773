"""Products and attention of our own in bf16 compute what torch does, and a row the same bits whatever is beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from specdec.engine.compiled import tiled_layers, tiled_linear
from specdec.engine.compiled.arena import Arena
from specdec.engine.compiled.compiling import compiled
from specdec.engine.compiled.kernels import Elements, Ints, rotate_row
from specdec.engine.compiled.pairs import runs_tiles
from specdec.engine.compiled.products import Floats, in_panels
from specdec.engine.compiled.shared_counters import pause
from specdec.engine.compiled.team import Crew, Team, claim, meet
from specdec.engine.compiled.tiled_attention import attend_heads, rotate
from specdec.engine.compiled.tiled_layers import bits
from specdec.engine.compiled.tiled_linear import RoundedTiledLinear, TiledLinear
from specdec.engine.compiled.vectors import LANES
from specdec.engine.int4_linear import MOST_ROUNDED_ROWS, levels_of
from specdec.engine.packed_linear import PackedLinear, pack_linears
from specdec.engine.packing import ALONE, LOOSE
from specdec.engine.runner import ModelRunner
from tools.engine import draw_tokens, drawn, feed_in_chunks, tiny_model, tiny_runner

pytestmark = pytest.mark.skipif(not runs_tiles(), reason="this CPU has no registers for tiles")

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Llama-wide": {"head_dim": 64},
}


def linear_of(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias, dtype=torch.bfloat16)
    linear.weight.data = drawn(outputs, inputs, seed=1)
    if bias:
        linear.bias.data = drawn(outputs, seed=2)
    return linear.requires_grad_(False)


@pytest.fixture(params=[1, 3], ids=["one_thread", "three_threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Shares even the smallest work."""
    count: int = request.param
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    monkeypatch.setattr(tiled_linear, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(tiled_layers, "FEW_PRODUCTS", 0)
    return count


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(96, 64, False), (34, 200, True), (2, 7, True)])
def test_a_product_is_torchs_to_rounding(inputs: int, outputs: int, bias: bool, threads: int) -> None:
    linear, rows = linear_of(inputs, outputs, bias), drawn(2, 7, inputs)
    exact = functional.linear(rows.double(), linear.weight.double(), linear.bias.double() if bias else None)
    ours = TiledLinear(linear, Team(), Arena())(rows)
    assert ours.shape == (2, 7, outputs)
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=2**-8 * inputs**0.5 / 8)


def test_a_row_has_the_same_bits_in_any_number_of_rows(threads: int) -> None:
    """Many rows of few panels are divided among threads."""
    tiled, rows = TiledLinear(linear_of(192, 130, True), Team(), Arena()), drawn(100, 192)
    whole = tiled(rows)
    for count in (*range(1, 20), 48, 53, 99):
        assert torch.equal(tiled(rows[:count]), whole[:count])
        assert torch.equal(tiled(rows[count:]), whole[count:])


def test_a_weight_without_pairs_of_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="7 inputs has no pairs"):
        in_panels(drawn(4, 7), Arena())


def tiny(kind: str, dtype: torch.dtype) -> Any:
    return tiny_model(kind.partition("-")[0], dtype, **KINDS[kind])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def runner(kind: str) -> ModelRunner:
    return tiny_runner(tiny(kind, torch.bfloat16), attention="tiled")


def test_the_layers_are_as_near_to_exact_ones_as_torchs(kind: str, runner: ModelRunner, threads: int) -> None:
    token_ids = draw_tokens(150)
    exact = feed_in_chunks(tiny_runner(tiny(kind, torch.float32), attention="sdpa"), token_ids, 150)
    torchs = feed_in_chunks(tiny_runner(tiny(kind, torch.bfloat16), attention="sdpa"), token_ids, 31)
    ours = feed_in_chunks(runner, token_ids, 31)
    assert (ours - exact).abs().mean() < 1.1 * (torchs - exact).abs().mean()


def test_a_row_has_the_same_bits_however_it_is_fed(runner: ModelRunner, threads: int) -> None:
    token_ids = draw_tokens(90)
    runner.packing = ALONE
    whole = feed_in_chunks(runner, token_ids, 90)
    for chunk in (1, 2, 5, 6, 7, 13):
        assert torch.equal(feed_in_chunks(runner, token_ids, chunk), whole)


def test_another_runner_of_a_tiled_model_computes_the_same_bits(kind: str) -> None:
    """Also where its rows are padded."""
    model, token_ids = tiny(kind, torch.bfloat16), draw_tokens(70)
    first = tiny_runner(model, attention="tiled")
    other = tiny_runner(model, attention="compiled")
    assert other.is_tiled
    assert torch.equal(feed_in_chunks(other, token_ids, 7), feed_in_chunks(first, token_ids, 70))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (5, 1, 64), (9, 3, 128), (7, 7, 80)])
def test_attention_in_registers_is_attention(heads: int, kv_heads: int, dim: int) -> None:
    keys, values, query = drawn(50, kv_heads, dim, seed=1), drawn(50, kv_heads, dim, seed=2), drawn(heads, dim)
    slots = np.arange(1, 50, 3)
    attended = torch.zeros(1, heads * dim).bfloat16()
    scaling = np.array([dim**-0.5], np.float32)
    attend_one(bits(query.reshape(1, -1)), bits(keys), bits(values), slots, scaling, bits(attended))
    fold = heads // kv_heads
    expected = functional.scaled_dot_product_attention(
        query[:, None].double(),
        keys[slots].transpose(0, 1).repeat_interleave(fold, 0).double(),
        values[slots].transpose(0, 1).repeat_interleave(fold, 0).double(),
    )
    torch.testing.assert_close(attended.view(heads, 1, dim).double(), expected, rtol=2**-8, atol=2**-10)


@compiled
def attend_one(
    query: Elements, keys: Elements, values: Elements, slots: Ints, scaling: Floats, attended: Elements
) -> None:
    _, kv_heads, dim = keys.shape
    fold = attended.shape[1] // dim // kv_heads
    scores, shares = np.empty((fold, len(slots) + LANES), np.float32), np.empty(fold, np.float32)
    for head in range(kv_heads):
        attend_heads(query, keys, values, slots, scaling, scores, shares, attended, 0, head)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_positions_rotated_in_registers_have_the_bits_of_those_rotated_one_by_one(dim: int) -> None:
    heads, kv_heads = 3, 2
    projected, cosine, sine = drawn(2, (heads + 2 * kv_heads) * dim), drawn(2, dim, seed=1), drawn(2, dim, seed=2)
    ours, expected = projected.clone(), projected.clone()
    rotate_one(bits(ours), bits(cosine), bits(sine), kv_heads, 1)
    rotate_one_by_one(bits(expected), bits(cosine), bits(sine), kv_heads, 1)
    assert torch.equal(ours, expected)
    assert torch.equal(ours[0], projected[0])
    assert not torch.equal(ours[1], projected[1])


@compiled
def rotate_one(projected: Elements, cosine: Elements, sine: Elements, kv_heads: int, row: int) -> None:
    rotate(projected, cosine, sine, kv_heads, row)


@compiled
def rotate_one_by_one(projected: Elements, cosine: Elements, sine: Elements, kv_heads: int, row: int) -> None:
    rotate_row(projected, cosine, sine, kv_heads, row)


def test_what_is_no_number_stays_in_its_sequence(runner: ModelRunner, threads: int) -> None:
    """And is seen there."""
    with torch.inference_mode():
        runner.model.model.embed_tokens.weight[3] = torch.nan
    token_ids = [1, 2, 3, 4]
    logits = feed_in_chunks(runner, token_ids, 4)
    assert logits.isnan().any(dim=-1).tolist() == [False, False, True, True]


def test_without_the_instructions_other_layouts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_linear, "runs_tiles", lambda: False)
    runner = tiny_runner(tiny_model("Llama", torch.bfloat16))
    runner.pack_linears()
    assert not runner.is_tiled
    packs = pack_linears(tiny_model("Llama", torch.bfloat16)) > 0  # torch packs only what it multiplies well here
    assert any(isinstance(module, PackedLinear) for module in runner.model.modules()) == packs


def test_products_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: Elements, matrix: Any, outputs: Elements, counters: Ints, threads: int) -> None:
        outputs[:] = rows[:, :1]

    monkeypatch.setattr(tiled_linear, "multiply", wrong)
    runner = tiny_runner(tiny_model("Llama", torch.bfloat16))
    runner.pack_linears()
    assert not runner.is_tiled


@compiled
def write_in_turn(seen: Ints, rounds: int, counters: Ints, threads: int) -> None:
    """Each round claims every place once, and reads what others wrote in the one before. The first place takes long, so
    that whoever does not wait for it reads too early."""
    crew = Crew(counters, np.ones(1, np.int64), threads)
    for number in range(rounds):
        place = claim(crew)
        while place < seen.shape[1]:
            for _ in range(2_000 if place == 0 else 0):
                pause()
            seen[number, place] = 1 if number == 0 else seen[number - 1, -1 - place] + 1
            place = claim(crew)
        meet(crew)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_team_does_every_piece_once_and_waits_for_the_last(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores, so some lose theirs at any point."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    seen = np.zeros((500, 7), np.int64)
    Team().run(500, write_in_turn, seen, 500)
    assert (seen == np.arange(1, 501)[:, None]).all()


def test_a_team_grows_with_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is short of a thread would wait for it for ever."""
    team = Team()
    for count in (2, 4, 1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        seen = np.zeros((20, 7), np.int64)
        team.run(20, write_in_turn, seen, 20)
        assert (seen == np.arange(1, 21)[:, None]).all()


def test_other_threads_run_while_a_team_computes() -> None:
    """A kernel must not hold the interpreter: a worker answers health checks meanwhile."""
    ticks: list[int] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    Team().run(2_000, write_in_turn, np.zeros((2_000, 999), np.int64), 2_000)
    done.set()
    thread.join()
    assert len(ticks) > 1


@pytest.mark.slow
def test_kernels_from_the_cache_give_the_bits_of_those_just_compiled(tmp_path: Path) -> None:
    code = """
import hashlib, torch
from tools.engine import draw_tokens, drawn, feed_in_chunks, tiny_model, tiny_runner
logits = feed_in_chunks(tiny_runner(tiny_model("Qwen2", torch.bfloat16), attention="tiled"), draw_tokens(60), 20)
print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    first, second = (
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment, capture_output=True)
        for _ in range(2)
    )
    assert first.stdout == second.stdout != b""


@pytest.mark.parametrize(("inputs", "outputs", "count"), [(64, 64, 1), (96, 200, 3), (32, 7, 8)])
def test_a_product_with_4_bits_is_that_with_the_rounded_weight(
    inputs: int, outputs: int, count: int, threads: int
) -> None:
    linear, rows = linear_of(inputs, outputs, True), drawn(count, inputs)
    found = levels_of(linear.weight, 32)
    scales, lowest = (part.bfloat16().double().repeat_interleave(32, dim=1) for part in (found.scales, found.lowest))
    expected = functional.linear(rows.double(), found.levels * scales + lowest, linear.bias.double())
    ours = RoundedTiledLinear(linear, Team(), Arena())(rows)
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=2**-8 * inputs**0.5 / 8)


def test_a_rounded_drafter_computes_many_rows_with_whole_weights() -> None:
    plain = tiny_runner(tiny_model("Llama", torch.bfloat16), attention="tiled")
    drafter = tiny_runner(tiny_model("Llama", torch.bfloat16), attention="compiled")
    assert drafter.round_linears_to_int4()
    assert drafter.is_tiled
    drafter.packing, plain.packing, token_ids = LOOSE, ALONE, draw_tokens(MOST_ROUNDED_ROWS + 1)
    whole = feed_in_chunks(plain, token_ids, len(token_ids))
    assert torch.equal(feed_in_chunks(drafter, token_ids, len(token_ids)), whole)
    rounded = feed_in_chunks(drafter, token_ids, 3)
    assert not torch.equal(rounded, whole)
    assert (rounded - whole).abs().mean() < 0.5 * whole.std()


def test_a_drafter_whose_inputs_make_no_groups_is_not_tiled() -> None:
    drafter = tiny_runner(tiny_model("Llama", torch.bfloat16, intermediate_size=80), attention="compiled")
    drafter.round_linears_to_int4()
    assert not drafter.is_tiled
