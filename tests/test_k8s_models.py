"""`outrider models verify`, with which a pod begins: a model that is not whole ends there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.model_check import SUMS, check_model
from services.models import ModelNotAvailable
from tools.manifest_table import empty_model
from tools.up import outrider


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return empty_model(tmp_path) / "models" / "smollm2-135m"


def write_sums(model: Path) -> None:
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(model.iterdir())]
    (model / SUMS).write_text("".join(lines))


def test_a_whole_model_passes_with_and_without_sums(model: Path) -> None:
    assert check_model(model) == 0
    write_sums(model)
    assert check_model(model) == 3


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def no_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)


def flipped(model: Path) -> None:
    write_sums(model)
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def shard_missing(model: Path) -> None:
    index = {"weight_map": {"weight": "model.safetensors", "more": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def half_written(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model\.safetensors has \d+ bytes, must have \d+: fetch it again"),
        (no_header, r"model\.safetensors is no safetensors file"),
        (flipped, r"model\.safetensors is not what SHA256SUMS says"),
        (shard_missing, r"cannot read .*model-00002-of-00002\.safetensors"),
        (half_written, r"config\.json is no JSON"),
        (no_tokenizer, r"cannot read .*tokenizer\.json"),
    ],
)
def test_what_is_not_whole_is_named(model: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(model)
    with pytest.raises(ModelNotAvailable, match=message) as caught:
        check_model(model)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03")
    assert check_model(file) == 0
    file.write_bytes(b"<html>")
    with pytest.raises(ModelNotAvailable, match="is no GGUF file"):
        check_model(file)


def test_the_command_prints_the_folder_or_one_line(model: Path) -> None:
    done = outrider("models", "verify", str(model))
    assert (done.returncode, done.stdout.strip()) == (0, str(model))
    shutil.rmtree(model)
    done = outrider("models", "verify", str(model))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: model ")
