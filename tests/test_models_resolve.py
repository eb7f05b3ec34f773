"""A name means an existing path, else a named source, else a hub id; what is wrong ends in one line with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from services import models
from services.model_fetch import FetchTools, ModelHome, ModelNotAvailable, Written
from services.model_sources import Part
from services.models import resolve

NAME = "smollm2-135m"


@pytest.fixture
def home(tmp_path: Path) -> ModelHome:
    return ModelHome(tmp_path / "home")


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def no_hub(repository: str) -> Path:
    raise AssertionError(f"the hub was asked for {repository}")


def no_network(part: Part, folder: Path, written: Written) -> None:
    raise ModelNotAvailable("cannot download: no network")


def test_an_existing_folder_comes_first(tmp_path: Path, home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(home.model(NAME))
    monkeypatch.chdir(tmp_path)
    folder = make_model(tmp_path / NAME)
    assert resolve(NAME, home=home, snapshot=no_hub) == folder
    hub_like = make_model(tmp_path / "org" / "name")
    assert resolve("org/name", home=home, snapshot=no_hub) == hub_like


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_model(tmp_path / "mine")
    assert resolve("~/mine", snapshot=no_hub) == folder


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file), snapshot=no_hub) == file


def test_another_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotAvailable, match=r"neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "model.bin"), snapshot=no_hub)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotAvailable, match="holds no model"):
        resolve(str(tmp_path), snapshot=no_hub)


def test_a_named_source_that_is_there(home: ModelHome) -> None:
    make_model(home.model(NAME))
    assert resolve(NAME, home=home, snapshot=no_hub) == home.model(NAME)


def test_a_named_source_that_is_not_names_the_command(home: ModelHome) -> None:
    with pytest.raises(ModelNotAvailable, match=f"run `outrider models fetch {NAME}`"):
        resolve(NAME, home=home, snapshot=no_hub)


def test_a_named_source_is_fetched_if_asked(home: ModelHome) -> None:
    tools = FetchTools(lambda: None, no_network, lambda *arguments: None, lambda folder: 1 << 40)
    with pytest.raises(ModelNotAvailable, match="no network"):
        resolve(NAME, fetch=True, home=home, tools=tools, snapshot=no_hub)


@pytest.mark.parametrize("word", ["no-such-model", "./no/such/folder", "/no/such", "a/b/c", "", "..", "smollm2"])
def test_a_word_that_is_nothing_is_refused_at_once(word: str, home: ModelHome) -> None:
    with pytest.raises(ModelNotAvailable) as refused:
        resolve(word, home=home, snapshot=no_hub)
    assert "\n" not in str(refused.value)
    if word != "..":  # which is a folder
        assert f"no such folder, no such named source (known: {NAME}" in str(refused.value)


def test_a_hub_id_is_asked_of_the_hub_last(tmp_path: Path, home: ModelHome) -> None:
    asked: list[str] = []

    def snapshot(repository: str) -> Path:
        asked.append(repository)
        return make_model(tmp_path / "snapshot")

    assert resolve("org/some-model.v1", home=home, snapshot=snapshot) == tmp_path / "snapshot"
    assert asked == ["org/some-model.v1"]


def test_an_unreachable_hub_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, home: ModelHome) -> None:
    def unreachable(repository: str, **options: object) -> str:
        raise OSError("We couldn't connect\nto the hub, and\nnothing is cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelNotAvailable, match="check the name and the network") as refused:
        resolve("org/name", home=home)
    assert "\n" not in str(refused.value)


def test_only_safetensors_and_text_are_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[str] = []

    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(make_model(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    resolve("org/name")
    assert not any(Path(name).match(pattern) for pattern in patterns for name in ("pytorch_model.bin", "x.pt", "x.py"))
    assert any(Path("tokenizer.json").match(pattern) for pattern in patterns)


def test_list_and_remove(home: ModelHome) -> None:
    make_model(home.model(NAME))
    home.downloads(NAME).mkdir(parents=True)
    entries = {entry.source.name: entry for entry in models.list_models(home)}
    assert list(entries) == list(models.SOURCES)
    assert (entries[NAME].present, entries[NAME].size_bytes) == (True, 9)
    assert not entries["qwen2.5-coder-0.5b"].present
    assert models.remove(NAME, home)
    assert not home.model(NAME).exists()
    assert not home.downloads(NAME).exists()
    assert not models.remove(NAME, home)


@pytest.mark.parametrize("call", [models.fetch, models.remove])
def test_an_unknown_name_is_refused_with_the_known_ones(call: object) -> None:
    with pytest.raises(ModelNotAvailable, match=f"known: {NAME}"):
        call("../escape")  # type: ignore[operator]


def test_the_home_is_set_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    assert models.list_models()[0].folder == tmp_path / "models" / NAME
    monkeypatch.setenv("OUTRIDER_HOME", "")
    assert models.list_models()[0].folder == Path("~/.cache/outrider/models").expanduser() / NAME
