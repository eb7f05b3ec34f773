"""A model that paged attention would serve wrong is refused at load, by name and reason; others pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from specdec.engine.errors import ModelRefused
from specdec.engine.loading import build_runner
from specdec.engine.packed_linear import PackedLinear, pack_linears
from specdec.engine.self_test import self_test
from specdec.engine.tiny_config import tiny_config
from tools.engine import COMMON, draw_tokens, feed_in_chunks, tiny_from, tiny_model, tiny_runner

SERVED: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 32},
    "Gemma2": {"sliding_window": 32},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Phimoe": ({"sliding_window": 32, "num_local_experts": 4}, "structure"),
    "Doge": ({}, "asks for a mask"),
    "DiffLlama": ({}, r"called paged attention as \[0, 0"),
    "Mamba": ({}, "recurrent"),
}
OLD_STYLE = {
    "Falcon": {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "GPTJ": {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
}


@pytest.mark.parametrize("kind", SERVED)
def test_causal_attention_models_pass(kind: str) -> None:
    self_test(tiny_runner(tiny_model(kind, **SERVED[kind])))


@pytest.mark.parametrize("kind", REFUSED)
def test_silently_different_models_are_refused(kind: str) -> None:
    changes, reason = REFUSED[kind]
    common = {key: value for key, value in COMMON.items() if kind != "Mamba" or "hidden" in key or "vocab" in key}
    model = tiny_from(getattr(transformers, f"{kind}Config")(**{**common, **changes}))
    with pytest.raises(ModelRefused, match=reason) as refusal:
        self_test(tiny_runner(model))
    assert type(model).__name__ in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", OLD_STYLE)
def test_models_that_never_call_us_are_refused(kind: str) -> None:
    model = tiny_from(getattr(transformers, f"{kind}Config")(**OLD_STYLE[kind]))
    with pytest.raises(ModelRefused, match=r"called paged attention as \[\]"):
        self_test(tiny_runner(model))


def test_a_row_that_depends_on_its_neighbours_is_refused() -> None:
    """As dynamic quantisation with one activation scale per batch does."""

    class SharedScale(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            scale = rows.abs().max() / 1000
            return torch.round(rows / scale) * scale

    model = tiny_model("Llama")
    runner = tiny_runner(model, attention="sdpa")
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), SharedScale())
    with pytest.raises(ModelRefused, match="rows beside it"):
        self_test(runner)


def test_weights_that_give_no_numbers_are_refused() -> None:
    model = tiny_model("Llama")
    model.model.layers[1].mlp.up_proj.weight.data[3] = torch.inf
    with pytest.raises(ModelRefused, match="not finite"):
        self_test(tiny_runner(model))


def test_the_small_copy_has_every_layer_type_and_a_cut_window() -> None:
    values: dict[str, Any] = {**COMMON, "num_hidden_layers": 6, "sliding_window": 4096}
    config = transformers.Gemma2Config(**values)
    tiny = tiny_config(config)
    assert tiny.layer_types == ["sliding_attention", "full_attention"]
    assert (tiny.num_hidden_layers, tiny.sliding_window) == (2, 8)


def test_a_moving_rope_table_is_frozen_at_load() -> None:
    """A row's RoPE must not depend on the longest sequence beside it."""
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("Llama", max_position_embeddings=64, rope_parameters=parameters)
    runner = build_runner(model, name="dynamic", kv_memory=2**24)
    table = model.model.rotary_emb.inv_freq.clone()
    short = feed_in_chunks(runner, draw_tokens(10), 10)
    feed_in_chunks(runner, draw_tokens(200), 200)
    assert torch.equal(model.model.rotary_emb.inv_freq, table)
    assert torch.equal(feed_in_chunks(runner, draw_tokens(10), 10), short)


def test_packed_weights_give_the_same_bits() -> None:
    """Where torch can pack; elsewhere nothing is packed and the bits are the same anyway."""
    token_ids = draw_tokens(50)
    plain = feed_in_chunks(tiny_runner(tiny_model("Qwen2", torch.bfloat16)), token_ids, 20)
    model = tiny_model("Qwen2", torch.bfloat16)
    packed = pack_linears(model)
    assert packed == sum(isinstance(module, PackedLinear) for module in model.modules())
    assert torch.equal(feed_in_chunks(tiny_runner(model), token_ids, 20), plain)
