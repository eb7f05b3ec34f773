"""A model's own configuration cut down, so that its class can be tried within a second: same structure, few weights."""

from __future__ import annotations

from typing import Any

TINY_WINDOW = 8
TINY_VOCABULARY = 128
TINY_KV_HEADS = 2
MOST_FOLDED_HEADS = 4

_SMALLER = {
    "vocab_size": TINY_VOCABULARY,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers")
_HEAD_COUNTS = ("num_attention_heads", "n_head")


def tiny_config(config: Any, narrow: bool = True) -> Any:
    """`config` with one layer of each layer type (two at least), small widths, and every window cut to 8 tokens.

    Without the cut window a short test would pass on exactly the models that it should refuse. Head size and RoPE stay,
    since tables of RoPE factors have their length. narrow: small widths too.
    """
    values = config.to_dict()
    _cut_layers(values, config.num_hidden_layers)
    if narrow:
        _cut_widths(values, config)
    for key, value in values.items():
        if _is_count(value) and ("window" in key or "chunk_size" in key):
            values[key] = min(value, TINY_WINDOW)
    for key in _TOKEN_IDS:
        if values.get(key) is not None:
            values[key] = 0
    for key in ("quantization_config", "distributed_config"):
        values.pop(key, None)
    return type(config).from_dict(values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cut_layers(values: dict[str, Any], layers: int) -> None:
    per_layer = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == layers}
    kinds = [tuple(map(repr, kind)) for kind in zip(*per_layer.values(), strict=True)] or [()] * layers
    chosen = sorted({kinds.index(kind) for kind in kinds})
    if len(chosen) == 1 and layers > 1:
        chosen = [0, 1]
    values.update({key: [value[i] for i in chosen] for key, value in per_layer.items()})
    values.update({key: len(chosen) for key in _LAYER_COUNTS if key in values})


def _cut_widths(values: dict[str, Any], config: Any) -> None:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept_kv_heads = min(TINY_KV_HEADS, kv_heads)
    kept_heads = kept_kv_heads * min(heads // kv_heads, MOST_FOLDED_HEADS)
    values.update({key: min(size, values[key]) for key, size in _SMALLER.items() if _is_count(values.get(key))})
    values.update({key: kept_heads for key in _HEAD_COUNTS if key in values})
    for key in ("num_key_value_heads", "num_kv_heads"):
        if values.get(key) is not None:
            values[key] = kept_kv_heads
    for key in ("hidden_size", "n_embd"):
        if key in values:
            values[key] = kept_heads * head_dim
