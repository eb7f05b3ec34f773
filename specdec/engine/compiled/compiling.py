"""How kernels are compiled, and where what was compiled is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""What the compiler may do to sums and products. Not `nnan`: what is no number has to be told."""

_settings: Any = numba.config

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": _REORDERED}


def compiled(function: _Kernel) -> _Kernel:
    """Compiled when first called and kept on the disk, if there is a folder that can be written."""
    before, _settings.CACHE_DIR = _settings.CACHE_DIR, str(_kept_in())
    try:
        return cast(_Kernel, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:
        return cast(_Kernel, numba.njit(**_OPTIONS)(function))
    finally:
        _settings.CACHE_DIR = before


def inlined(function: _Kernel) -> _Kernel:
    """A part of kernels. As a function of its own it would be reordered otherwise where it came from the cache than
    where it was just compiled, and two processes would differ in the last bit."""
    return cast(_Kernel, numba.njit(inline="always", **_OPTIONS)(function))


def is_kept() -> bool:
    """Whether an earlier process has compiled kernels of these sources and kept them."""
    return any(_kept_in().rglob("*.nbc"))


def folder_of_sources() -> str:
    """A name for these sources alone: numba minds only changes of the file that a kernel is in, not of its parts'."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _kept_in() -> Path:
    """In the folder that NUMBA_CACHE_DIR names, if any."""
    return Path(_settings.CACHE_DIR or Path(__file__).parent / "__pycache__") / folder_of_sources()
