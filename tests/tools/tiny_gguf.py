"""A GGUF file of a few kilobytes: a Llama with random weights over a byte-level vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 32, 2, 2, 64, 256
END = "<|end|>"


def byte_letters() -> list[str]:
    """How byte-level vocabularies spell each byte: itself where it can be seen, else a letter from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


def write_tiny_gguf(file: Path) -> None:
    tokens = [*byte_letters(), "ab", END]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(len(tokens) - 1)
    _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weights(writer: gguf.GGUFWriter, vocabulary_size: int) -> None:
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", random.normal(0.0, 1.5 / shape[-1] ** 0.5, shape).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", vocabulary_size, HIDDEN)
    add("output", vocabulary_size, HIDDEN)
    add_norm("output_norm")
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}", FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, FEED_FORWARD)
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}")
