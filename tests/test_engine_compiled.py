"""Compiled decoder layers compute what the stock layers do, for the models that have those layers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch.nn import functional

from specdec.engine.compiled import compiling, kernels, row_threads
from specdec.engine.compiled.decoder import elements, is_compilable
from specdec.engine.compiled.row_threads import RowThreads
from specdec.engine.loading import load
from tools.engine import draw_tokens, feed_in_chunks, tiny_model, tiny_runner

ROWS, WIDTH, DIM = 9, 48, 16
HEADS, KV_HEADS = 6, 2
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, generator=GENERATOR).to(dtype)


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit in bf16, whose roundings hide another order of summation."""
    if ours.dtype == torch.bfloat16:
        assert torch.equal(ours, expected)
    else:
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_norm_rounds_where_the_stock_norm_does(dtype: torch.dtype) -> None:
    hidden, added, weight = (
        drawn(ROWS, WIDTH, dtype=dtype),
        drawn(ROWS, WIDTH, dtype=dtype),
        drawn(WIDTH, dtype=dtype),
    )
    state, ours = hidden.clone(), torch.empty_like(hidden)
    kernels.add_and_normalize(elements(state), elements(added), elements(weight), 1e-5, elements(ours), 0, ROWS)
    total = hidden + added
    scale = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(state, total)
    assert_same(ours, weight * (total.float() * scale).to(dtype))
    again = torch.empty_like(ours)
    kernels.normalize(elements(total), elements(weight), 1e-5, elements(again), 0, ROWS)
    assert torch.equal(again, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_gate_is_the_stock_one(dtype: torch.dtype) -> None:
    both = torch.cat([torch.linspace(-120, 120, ROWS * WIDTH).view(ROWS, WIDTH), torch.ones(ROWS, WIDTH)], dim=1).to(
        dtype
    )
    ours = torch.empty(ROWS, WIDTH, dtype=dtype)
    kernels.gate(elements(both), elements(ours), 0, ROWS)
    torch.testing.assert_close(
        ours, functional.silu(both[:, :WIDTH]), atol=1e-6, rtol=2e-6 if dtype == torch.float32 else 0
    )


def test_positions_are_rotated_and_stored_as_stock() -> None:
    width = (HEADS + 2 * KV_HEADS) * DIM
    projected, cosine, sine = drawn(ROWS, width), drawn(ROWS, DIM), drawn(ROWS, DIM)
    keys, values = torch.zeros(50, KV_HEADS, DIM).bfloat16(), torch.zeros(50, KV_HEADS, DIM).bfloat16()
    slots = np.arange(3, 3 + 4 * ROWS, 4)
    ours = projected.clone()
    kernels.rotate_and_store(
        elements(ours), elements(cosine), elements(sine), elements(keys), elements(values), slots, 0, ROWS
    )
    query, key, value = torch.split(projected.view(ROWS, -1, DIM), [HEADS, KV_HEADS, KV_HEADS], dim=1)

    def rotated(part: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-part[..., DIM // 2 :], part[..., : DIM // 2]), dim=-1)
        return part * cosine[:, None] + turned * sine[:, None]

    assert torch.equal(ours.view(ROWS, -1, DIM)[:, :HEADS], rotated(query))
    assert torch.equal(keys[slots], rotated(key))
    assert torch.equal(values[slots], value)
    assert keys.count_nonzero() == keys[slots].count_nonzero()


def test_what_is_no_number_stays_in_its_row_and_is_seen() -> None:
    """In a query, and in the last key only, which no earlier row reads."""
    projected = drawn(ROWS, (HEADS + 2 * KV_HEADS) * DIM)
    keys, values = drawn(ROWS, KV_HEADS, DIM), drawn(ROWS, KV_HEADS, DIM)
    projected[2, 0] = torch.nan
    keys[ROWS - 1] = torch.nan
    attended = torch.zeros(ROWS, HEADS * DIM).bfloat16()
    kernels.attend(
        elements(projected), elements(keys), elements(values), np.arange(ROWS), np.zeros(ROWS, np.int64),
        np.arange(1, ROWS + 1), DIM**-0.5, elements(attended), 0, ROWS,
    )  # fmt: skip
    lost = attended.isnan().view(ROWS, HEADS, DIM).any(dim=-1)
    assert lost.nonzero().tolist() == [[2, 0], *([ROWS - 1, head] for head in range(HEADS))]


def test_threads_share_the_rows_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, token_ids = tiny_model("Llama", torch.bfloat16), draw_tokens(90)
    alone = feed_in_chunks(tiny_runner(model), token_ids, 90)
    shares: list[tuple[int, int]] = []

    def counting(kernel: Callable[..., None], *arguments: Any) -> None:
        shares.append(arguments[-2:])
        kernel(*arguments)

    run = RowThreads.run
    monkeypatch.setattr(row_threads, "SMALLEST_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(
        RowThreads, "run", lambda self, work, kernel, *rest: run(self, work, lambda *a: counting(kernel, *a), *rest)
    )
    assert torch.equal(feed_in_chunks(tiny_runner(model), token_ids, 90), alone)
    assert {start for start, _ in shares} > {0}
    assert sorted(shares[-3:])[-1][1] == 92  # the last share of the last kernel: 90 rows and two that pad


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("Mistral", {"sliding_window": 20}), ("Llama", {"hidden_act": "gelu"}), ("Gemma2", {}), ("Phi3", {}),
     ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1})],
)  # fmt: skip
def test_other_layers_than_these_stay_stock(kind: str, changes: dict[str, Any]) -> None:
    model = tiny_model(kind, **changes)
    assert not is_compilable(model)
    assert not tiny_runner(model).is_compiled
    with pytest.raises(ValueError, match="attention is compiled, which does not work here"):
        tiny_runner(model, attention="compiled")


def test_windows_that_are_off_hinder_nothing() -> None:
    assert is_compilable(tiny_model("Mistral", sliding_window=None))
    assert is_compilable(tiny_model("Qwen2", use_sliding_window=False, sliding_window=20))
    assert not is_compilable(tiny_model("Llama", torch.float16))


def test_layers_that_compute_something_else_give_way_to_the_stock_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model("Llama").save_pretrained(tmp_path)

    def wrong(gates_and_ups: kernels.Elements, gated: kernels.Elements, start: int, end: int) -> None:
        gated[start:end] = gates_and_ups[start:end, : gated.shape[1]]

    monkeypatch.setattr(kernels, "gate", wrong)
    runner = load(tmp_path, dtype="fp32", kv_memory=2**24)
    assert not runner.is_compiled
    assert "its structure needs more than paged causal attention" in caplog.text
    assert "trying its stock layers" in caplog.text


@pytest.mark.parametrize("kept", [False, True])
def test_compiling_is_told_where_nothing_was_kept(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    if kept:
        folder = tmp_path / "kept" / compiling.folder_of_sources() / "part"
        folder.mkdir(parents=True)
        (folder / "kernel.1.nbc").touch()
    tiny_model("Llama").save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.INFO):
        load(tmp_path / "model", dtype="fp32", kv_memory=2**24, self_test=False)
    assert ("compiling kernels" in caplog.text) is not kept


def test_without_a_folder_for_its_cache_everything_is_compiled_anew(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from specdec.engine.compiled import kernels
import numpy as np
ones = np.ones((2, 8), np.float32)
kernels.normalize(ones, ones[0], 0.0, out := np.zeros_like(ones), 0, 2)
assert (out == 1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_kernels_from_the_cache_give_the_bits_of_those_just_compiled(tmp_path: Path) -> None:
    """Else a sequence that goes on at another worker could go another way there."""
    code = """
import hashlib
import numpy as np
from specdec.engine.compiled import kernels
draw = np.random.default_rng(0)
def drawn(*size): return draw.standard_normal(size).astype(np.float32)
hidden, normalized, attended = drawn(9, 96), np.zeros((9, 96), np.float32), np.zeros((9, 96), np.float32)
kernels.add_and_normalize(hidden, drawn(9, 96), drawn(96), 1e-5, normalized, 0, 9)
kernels.attend(
    drawn(9, 160), drawn(300, 2, 16), drawn(300, 2, 16), np.arange(300), np.arange(9), np.arange(200, 209), 0.25,
    attended, 0, 9,
)
print(hashlib.sha256(normalized.tobytes() + attended.tobytes()).hexdigest())
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment, capture_output=True)
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc"))
    assert first.stdout == second.stdout != b""
