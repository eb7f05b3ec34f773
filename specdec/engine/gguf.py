"""Turning a GGUF file into a folder of safetensors, once, so that later loads are quick."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

GROWTH = 4
"""Disk asked for per byte of a GGUF file: 4-bit weights grow about 3.5 times in bf16."""


class ConversionFailed(Exception):
    """The GGUF file could not be converted; the message says what to do."""


def convert_gguf(gguf_file: Path, out_folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `out_folder` with safetensors, config, tokenizer and chat template of `gguf_file`.

    It is written under a temporary name beside `out_folder` and renamed at the end, so a broken conversion is never
    taken for a model. An existing `out_folder` is left as it is. Raises `ConversionFailed` (unreadable or unsupported
    file, disk full).
    """
    if out_folder.exists():
        return
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(gguf_file, out_folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_folder.name}-", dir=out_folder.parent))
    try:
        _convert(gguf_file, scratch, dtype)
        scratch.chmod(0o755)
        scratch.rename(out_folder)
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError, ImportError) as error:
        if out_folder.exists():  # another process was faster
            return
        raise ConversionFailed(f"cannot convert {gguf_file}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_disk(gguf_file: Path, folder: Path) -> None:
    needed = gguf_file.stat().st_size * GROWTH
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConversionFailed(f"{folder}: {free / 1e9:.1f} GB free, converting needs {needed / 1e9:.1f} GB: make room")


def _convert(gguf_file: Path, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf_file.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
        trust_remote_code=False,
    )
    # transformers counts a model that came out of a GGUF file as quantised and refuses to save it.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name, trust_remote_code=False)
    tokenizer.save_pretrained(folder)
