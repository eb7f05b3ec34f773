"""The target's GGUF file as its publisher quantised it (Q4_K_M), for llama.cpp. We keep converted models only."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from bench.peers.known import FOLDER
from services.model_fetch import REAL_TOOLS, ModelHome, Written, fetch_source
from services.model_sources import SOURCES

MODEL = "qwen2.5-coder-1.5b"


def gguf_file() -> Path:
    return FOLDER / "gguf" / f"{MODEL}.gguf"


def fetch_gguf() -> Path:
    """Downloads and checks it unless it is there. Raises ModelNotAvailable."""
    path = gguf_file()
    if path.is_file():
        return path

    def keep(joined: Path, folder: Path, written: Written) -> None:
        """In place of converting; a folder of a model must look like one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        os.link(joined, scratch)
        scratch.rename(path)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "none.safetensors").touch()

    home = ModelHome(path.parent / "fetching")
    print(f"Fetching {path.name} (1.1 GB)", file=sys.stderr)
    fetch_source(SOURCES[MODEL], home, replace(REAL_TOOLS, convert=keep), lambda progress: None)
    shutil.rmtree(home.root)
    return path
