"""Small random models over the real engine, and ways to feed the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from specdec.engine.compiled.pairs import runs_tiles
from specdec.engine.loading import build_runner
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.log import Log

VOCABULARY = 160
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """`kind` is transformers' prefix, such as Llama or Mistral; weights are random, and the same every time."""
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **changes})
    return tiny_from(config, dtype)


def tiny_from(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # the stock initialisation is so small that all logits look alike
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


def tiny_runner(model: Any, *, kv_memory: int = 2**24, attention: str = "auto", max_context: int = 768) -> ModelRunner:
    """attention: as in the settings, or `tiled`: with products of our own too; the test is skipped where they cannot
    be."""
    tiled = attention == "tiled"
    if tiled and not runs_tiles():
        pytest.skip("this CPU has no registers for tiles")
    implementation = "compiled" if tiled else attention
    runner = build_runner(
        model, name="tiny", kv_memory=kv_memory, implementation=implementation, max_context=max_context
    )
    if tiled:
        runner.pack_linears()
        assert runner.is_tiled
    return runner


def draw_tokens(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, vocabulary, (count,), generator=generator)]


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    """Of bf16, around zero."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def feed(runner: ModelRunner, name: str, token_ids: Sequence[int]) -> torch.Tensor:
    """Runs the tokens as one chain of an open sequence and keeps them. Logits of all rows, [rows, vocab]."""
    assert runner.reserve(name, len(token_ids))
    [logits] = runner.forward([Segment(name, tuple(token_ids), None, len(token_ids))])
    runner.keep(name, range(len(token_ids)))
    return logits


def feed_in_chunks(runner: ModelRunner, token_ids: Sequence[int], chunk: int, name: str = "chunked") -> torch.Tensor:
    """Logits of all tokens, fed as chunks to a fresh sequence that is released again."""
    runner.open(name, Log(name.encode()))
    logits = [feed(runner, name, token_ids[i : i + chunk]) for i in range(0, len(token_ids), chunk)]
    runner.release(name)
    return torch.cat(logits)


@torch.inference_mode()
def stock_logits(runner: ModelRunner, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of transformers' own uncached forward, float32, [tokens, vocab]."""
    runner.model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = runner.model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    finally:
        runner.model.set_attn_implementation("outrider_paged")
    return logits[0].float()
