"""Random models of a realistic shape, built on the device, and one step of transformers' own with the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specdec.engine.attention import ATTENTION_NAME

CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model: widths, layers and vocabulary."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int = CONTEXT


TARGET_8B = Shape(4096, 14336, 32, 32, 8, 128, 128_256)
DRAFT_1B = Shape(2048, 8192, 16, 32, 8, 64, 128_256)
TINY_TARGET = Shape(128, 256, 4, 8, 2, 16, 2048, 1024)
TINY_DRAFT = Shape(64, 128, 2, 4, 2, 16, 2048, 1024)


def build_model(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> Any:
    """A Llama of this shape with random weights, made where they stay: nothing is copied to the device. They are wider
    than the stock initialisation, under which all logits look alike."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
    )
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        model: Any = factory.from_config(config, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.5 / math.sqrt(parameter.shape[-1]), generator=generator)
    # A stop token would end one contestant's answer early.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@contextmanager
def stock(model: Any, implementation: str = "sdpa") -> Iterator[Any]:
    """Within this context the model attends as transformers does."""
    model.set_attn_implementation(implementation)
    try:
        yield model
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@torch.inference_mode()
def stock_full(model: Any, token_ids: Sequence[int], implementation: str = "sdpa") -> torch.Tensor:
    """Logits of one uncached forward, float32, [tokens, vocab]."""
    with stock(model, implementation):
        ids = torch.tensor([list(token_ids)], device=model.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def stock_cached(model: Any, token_ids: Sequence[int], prefilled: int) -> torch.Tensor:
    """The same logits behind the first `prefilled` tokens, one token at a time over a cache: [tokens - prefilled,
    vocab]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    rows: list[torch.Tensor] = []
    with stock(model):
        ids = torch.tensor([list(token_ids)], device=model.device)
        model(input_ids=ids[:, :prefilled], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for i in range(prefilled, len(token_ids)):
            output = model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            rows.append(output.logits[0, -1].float())
    return torch.stack(rows)
