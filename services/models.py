"""Models by name: what is there, and how `resolve` turns a name, a folder or a hub id into a folder.

Kept in `$OUTRIDER_HOME/models/NAME` (default `~/.cache/outrider`). Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.model_fetch import (
    REAL_TOOLS,
    FetchTools,
    ModelHome,
    ModelNotAvailable,
    Progress,
    Report,
    Stage,
    fetch_source,
    folder_bytes,
    holds_model,
)
from services.model_sources import SOURCES, ModelSource

__all__ = [
    "SOURCES",
    "ModelEntry",
    "ModelNotAvailable",
    "Progress",
    "Stage",
    "fetch",
    "list_models",
    "remove",
    "resolve",
]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")
HUB_TIMEOUT = 10.0
"""Seconds for one connection to the hub."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A named source and what is kept of it. size_bytes: on disk now, 0 if absent."""

    source: ModelSource
    folder: Path
    present: bool
    size_bytes: int


def _silent(progress: Progress) -> None:
    """Takes progress nobody asked for."""


def fetch(
    name: str,
    progress: Report | None = None,
    *,
    home: ModelHome | None = None,
    tools: FetchTools = REAL_TOOLS,
) -> Path:
    """Returns the folder of a named source, downloading and converting it unless it is there.

    Goes on where an interrupted call ended; waits while another process fetches the same model. Raises
    `ModelNotAvailable` (unknown name, no network, disk full, damaged download, failed conversion).
    """
    source = _source(name)
    return fetch_source(source, home or ModelHome.from_environment(), tools, progress or _silent)


def list_models(home: ModelHome | None = None) -> tuple[ModelEntry, ...]:
    """All named sources, present or not."""
    home = home or ModelHome.from_environment()
    return tuple(_entry(source, home) for source in SOURCES.values())


def _entry(source: ModelSource, home: ModelHome) -> ModelEntry:
    folder = home.model(source.name)
    present = home.has(source.name)
    return ModelEntry(source, folder, present, folder_bytes(folder) if present else 0)


def remove(name: str, home: ModelHome | None = None) -> bool:
    """Deletes a named model and what is left of its download; False if there was nothing. Raises
    `ModelNotAvailable` if the name is unknown."""
    source = _source(name)
    home = home or ModelHome.from_environment()
    found = False
    with home.lock(source.name):
        folder = home.model(source.name)
        if folder.exists():
            # Renamed first: a folder that is half deleted is never taken for a model.
            grave = Path(tempfile.mkdtemp(prefix=f".{source.name}-", dir=home.models))
            folder.rename(grave / "removed")
            found = True
        for left_over in [home.downloads(source.name), *home.models.glob(f".{source.name}-*")]:
            found = found or left_over.exists()
            shutil.rmtree(left_over, ignore_errors=True)
    return found


def resolve(
    name_or_path: str,
    *,
    fetch: bool = False,
    progress: Report | None = None,
    home: ModelHome | None = None,
    tools: FetchTools = REAL_TOOLS,
    snapshot: Callable[[str], Path] | None = None,
) -> Path:
    """Returns the folder (or `.gguf` file) of a model: an existing path, else a named source, else a hub id.

    A hub is asked only for `organisation/name`, by `snapshot` (default `hub_snapshot`). Raises `ModelNotAvailable`.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
        return _checked(path)
    if name_or_path in SOURCES:
        home = home or ModelHome.from_environment()
        if home.has(name_or_path):
            return home.model(name_or_path)
        if not fetch:
            raise ModelNotAvailable(f"{name_or_path} is not fetched yet: run `outrider models fetch {name_or_path}`")
        return fetch_source(SOURCES[name_or_path], home, tools, progress or _silent)
    if HUB_ID.fullmatch(name_or_path):
        return _checked((snapshot or hub_snapshot)(name_or_path))
    raise ModelNotAvailable(_unknown(name_or_path))


def _source(name: str) -> ModelSource:
    source = SOURCES.get(name)
    if source is None:
        raise ModelNotAvailable(f"no named source {name!r} (known: {', '.join(SOURCES)})")
    return source


def _unknown(name: str) -> str:
    return f"model {name!r}: no such folder, no such named source (known: {', '.join(SOURCES)}), no hub id (org/name)"


def _checked(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path.absolute()
        raise ModelNotAvailable(f"{path} is neither a folder nor a .gguf file: give the folder that holds config.json")
    if not holds_model(path):
        raise ModelNotAvailable(f"{path} holds no model: it needs config.json and *.safetensors (or give a .gguf file)")
    return path.absolute()


def hub_snapshot(repository: str) -> Path:
    """Downloads a model from the hub, or finds it in the hub's own cache. Raises `ModelNotAvailable`."""
    # Read by huggingface_hub when it is imported.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(HUB_TIMEOUT)))
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise ModelNotAvailable(f"{repository}: hub ids need huggingface_hub: install `outrider[worker]`") from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelNotAvailable(
            f"model {repository!r}: no such folder, no such named source, and the hub did not give it ({reason}); "
            "check the name and the network, or give a local folder"
        ) from error
