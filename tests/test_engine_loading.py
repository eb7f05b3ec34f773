"""Loading from a folder: the dtype, the context, the real vocabulary, and one line for each thing that is wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from specdec.engine.compiled.pairs import runs_tiles
from specdec.engine.errors import ModelRefused
from specdec.engine.loading import has_native_bf16, load, resolve_dtype
from specdec.engine.vocabulary_size import real_vocabulary_size
from tools.engine import draw_tokens, feed_in_chunks, tiny_model, tiny_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("Llama").save_pretrained(path)
    return path


def test_a_saved_model_comes_back_the_same(folder: Path) -> None:
    runner = load(folder, dtype="fp32", kv_memory=2**24)
    assert (runner.name, runner.dtype, runner.device) == ("tiny-llama", "float32", "cpu")
    assert (runner.vocabulary_size, runner.context_length) == (160, 1024)
    token_ids = draw_tokens(40)
    expected = feed_in_chunks(tiny_runner(tiny_model("Llama")), token_ids, 40)
    assert torch.equal(feed_in_chunks(runner, token_ids, 7), expected)


def test_settings_reach_the_runner(folder: Path) -> None:
    runner = load(folder, dtype="bf16", kv_memory=2**24, max_context=200, vocabulary_size=150, attention="reference")
    assert (runner.dtype, runner.context_length, runner.vocabulary_size) == ("bfloat16", 200, 150)


def test_a_device_that_is_not_there_is_said_in_one_line(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"device is cuda:99, but torch finds \d+ CUDA devices.*: use --device cpu"):
        load(folder, kv_memory=2**24, device="cuda:99")


@pytest.mark.skipif(not runs_tiles(), reason="this CPU has no registers for tiles")
def test_auto_takes_bf16_where_products_are_our_own(folder: Path, tmp_path: Path) -> None:
    """Elsewhere torch's products are taken, which are slow in bf16 unless the hardware has it."""
    assert load(folder, kv_memory=2**24, self_test=False).dtype == "bfloat16"
    tiny_model("Gemma2").save_pretrained(tmp_path)
    by_torch = str(resolve_dtype("auto", "cpu")).removeprefix("torch.")
    assert load(tmp_path, kv_memory=2**24, self_test=False).dtype == by_torch
    assert load(folder, kv_memory=2**24, attention="sdpa", self_test=False).dtype == by_torch


def test_by_torch_auto_takes_bf16_only_where_the_hardware_has_it() -> None:
    assert resolve_dtype("auto", "cpu") is (torch.bfloat16 if has_native_bf16("cpu") else torch.float32)
    with pytest.raises(ValueError, match="must be auto, bf16 or fp32"):
        resolve_dtype("int3", "cpu")


def test_the_number_of_full_sequences_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(folder, dtype="fp32", kv_memory=3 * 64 * 768 * 16, self_test=False)
    assert "hold 3.0 sequences of the full context of 1024 tokens" in caplog.text


def test_kv_memory_for_less_than_one_sequence_is_refused(folder: Path) -> None:
    with pytest.raises(ModelRefused, match="raise kv_memory or lower max_context"):
        load(folder, dtype="fp32", kv_memory=2**16)


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "absent", empty):
        with pytest.raises(ModelRefused, match=path.name) as refusal:
            load(path, dtype="fp32")
        assert "\n" not in str(refusal.value)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = tiny_model("Llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused):
        load(tmp_path, dtype="fp32")


def test_placeholders_at_the_end_are_no_vocabulary(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "[PAD]": 2, "c": 3, "[PAD4]": 4, "[PAD5]": 5}
    added = [{"id": 6, "content": "[PAD6]"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    assert real_vocabulary_size(tmp_path) == 4
    assert real_vocabulary_size(tmp_path / "absent") is None


def test_the_real_model_has_its_real_vocabulary(smollm2: Path) -> None:
    assert real_vocabulary_size(smollm2) == 49152
