"""Is what lies in a model's folder a whole model? Looked at before a worker spends minutes on loading it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from services.models import ModelNotAvailable

SUMS = "SHA256SUMS"
"""A file of this name in the folder, as `sha256sum` writes it, says what the other files must be."""
CHUNK = 1 << 22
_MAX_HEADER = 100 * 2**20


def check_model(path: Path) -> int:
    """Returns how many files were compared with SHA256SUMS. path: a model's folder, or a GGUF file.

    Raises ModelNotAvailable for a file that is missing, cut short, no JSON, or not what its sum says.
    """
    folder = path if path.is_dir() else path.parent
    try:
        if path.is_dir():
            for name in ("config.json", "tokenizer.json"):
                _json(folder / name)
            for shard in _shards(folder):
                _check_safetensors(shard)
        else:
            _check_gguf(path)
        return _check_sums(folder)
    except OSError as error:
        raise ModelNotAvailable(f"cannot read {error.filename}: {error.strerror}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelNotAvailable(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotAvailable(f"{file} holds no object")
    return content


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / name for name in _json(index).get("weight_map", {}).values()})
    return sorted(folder.glob("*.safetensors"))


def _check_safetensors(file: Path) -> None:
    """The header says where each tensor ends, so a file that was cut short shows without being read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise ModelNotAvailable(f"{file} is no safetensors file")
        try:
            header = json.loads(stream.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ModelNotAvailable(f"{file} is no safetensors file") from error
    if size != wanted:
        raise ModelNotAvailable(f"{file} has {size} bytes, must have {wanted}: fetch it again")


def _check_gguf(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelNotAvailable(f"{file} is no GGUF file")


def _check_sums(folder: Path) -> int:
    sums = folder / SUMS
    if not sums.exists():
        return 0
    lines = [line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip()]
    for line in lines:
        if len(line) != 2:
            raise ModelNotAvailable(f"{sums}: each line must be a sum and a name")
        wanted, name = line[0], line[1].removeprefix("*")
        digest = hashlib.sha256()
        with (folder / name).open("rb") as stream:
            while data := stream.read(CHUNK):
                digest.update(data)
        if digest.hexdigest() != wanted:
            raise ModelNotAvailable(f"{folder / name} is not what {SUMS} says: fetch it again")
    return len(lines)
