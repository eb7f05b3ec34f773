"""The overlay local-cpu on this machine: real processes, but a table model in place of each target's."""

from __future__ import annotations

import json
import ssl
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from services.embedded_redis import find_redis_server
from tools.manifest import OVERLAYS, Manifest
from tools.manifest_cluster import Cluster

TABLE = (sys.executable, "-m", "tools.manifest_outrider")
KEY = "local-only-key"


def local_cluster(
    folder: Path, overlay: str = "local-cpu", outrider: Sequence[str] = TABLE, models: Path | None = None
) -> Cluster:
    """outrider: what runs in place of the images' entry point. models: what is on each model volume; none: a model that
    is whole, and empty."""
    manifest = Manifest.render(OVERLAYS / overlay)
    commands = {
        "outrider-scheduler": outrider,
        "outrider-worker": outrider,
        "redis-server": [str(find_redis_server())],
        "sh": ["sh"],
    }
    return Cluster(manifest, commands, {"models": models or empty_model(folder)})


def empty_model(folder: Path) -> Path:
    """A volume with a model that is whole, and empty."""
    model = folder / "volume" / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder / "volume"


@dataclass(slots=True)
class Client:
    """Asks the Service over HTTP, on a new connection each time, as many clients would."""

    base_url: str
    authority: bytes | None = None
    """PEM of whom to trust, where the Service speaks TLS."""
    failures: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, cluster: Cluster, authority: bytes | None = None) -> Client:
        return cls(f"{'https' if authority else 'http'}://{cluster.address('outrider', 'http')}", authority)

    async def ask(self, prompt: str, max_tokens: int, key: str = KEY) -> httpx2.Response:
        trust = ssl.create_default_context(cadata=self.authority.decode()) if self.authority else True
        async with httpx2.AsyncClient(trust_env=False, timeout=90, verify=trust) as client:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(f"{self.base_url}/v1/completions", json=body, headers=headers)

    async def note(self, prompt: str, max_tokens: int) -> None:
        """One request whose outcome is kept."""
        try:
            answer = await self.ask(prompt, max_tokens)
        except httpx2.HTTPError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        if answer.status_code != 200:
            self.failures.append(answer.text)
        else:
            self.answers.append(answer.json()["choices"][0]["text"])
