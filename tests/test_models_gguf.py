"""A GGUF file as a model: `outrider up` converts it once and serves it; what is none is refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services import model_fetch
from services.model_fetch import ModelNotAvailable
from tools.tiny_gguf import write_tiny_gguf
from tools.up import Up, outrider


@pytest.mark.slow
def test_outrider_up_serves_a_gguf_file_and_converts_it_once(tmp_path: Path) -> None:
    file, home = tmp_path / "tiny.gguf", tmp_path / "home"
    write_tiny_gguf(file)
    first = answer_of(file, home)
    (converted,) = (home / "converted").iterdir()
    written_at = (converted / "model.safetensors").stat().st_mtime_ns
    second = answer_of(file, home)
    assert first["model"] == "tiny"
    assert len(first["token_ids"]) == 12
    assert second["token_ids"] == first["token_ids"]
    assert [path.name for path in (home / "converted").iterdir()] == [converted.name]
    assert (converted / "model.safetensors").stat().st_mtime_ns == written_at


def answer_of(file: Path, home: Path) -> dict[str, Any]:
    with Up("--model", str(file), target="", draft="", OUTRIDER_HOME=str(home)) as up:
        up.wait_ready()
        arguments = ("--address", up.address, "--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--json")
        done = outrider("generate", "ab ab ab", *arguments)
        assert done.returncode == 0, done.stderr
        up.interrupt()
        assert up.end() == 0
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_file_that_is_no_gguf_is_refused_by_the_real_converter(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelNotAvailable, match=r"cannot convert x\.gguf") as refused:
        model_fetch.convert_in_child(tmp_path / "x.gguf", tmp_path / "out" / "model", lambda written: None)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out" / "model").exists()
