"""What `outrider --version` tells, without importing what it tells about."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator

from outrider.version import __version__
from specdec.messages import PROTOCOL_VERSION

PACKAGES = ("torch", "transformers", "grpcio")
NVIDIA_SECONDS = 5.0


def version_lines() -> Iterator[str]:
    yield f"outrider {__version__}"
    yield f"protocol {PROTOCOL_VERSION}"
    yield f"python {platform.python_version()}"
    for package in PACKAGES:
        yield f"{package} {installed_version(package)}"
    yield f"devices {', '.join(devices())}"


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def devices() -> list[str]:
    """`cpu`, and each GPU that the NVIDIA driver names."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ["cpu"]
    try:
        listed = subprocess.run(
            (tool, "--query-gpu=name", "--format=csv,noheader"),
            capture_output=True,
            text=True,
            timeout=NVIDIA_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ["cpu"]
    names = [name.strip() for name in listed.stdout.splitlines() if name.strip()]
    return ["cpu", *(f"cuda:{index} ({name})" for index, name in enumerate(names))]
