"""The rendered overlay local-cpu as real processes: it answers, and is replaced under load without a failed request."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import httpx2

from services.embedded_redis import find_redis_server
from tools.manifest import OVERLAYS, Manifest
from tools.manifest_cluster import Cluster

TABLE = [sys.executable, "-m", "tools.manifest_outrider"]


def model_volume(folder: Path) -> Path:
    """A volume with a model that is whole, and empty."""
    model = folder / "seed" / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder / "seed"


async def test_it_answers(tmp_path: Path) -> None:
    manifest = Manifest.render(OVERLAYS / "local-cpu")
    commands = {"outrider-scheduler": TABLE, "outrider-worker": TABLE, "redis-server": [str(find_redis_server())]}
    async with Cluster(manifest, tmp_path / "c", commands, {"models": model_volume(tmp_path)}) as cluster:
        url = f"http://{cluster.address('outrider', 'http')}/v1/completions"
        headers = {"authorization": "Bearer local-only-key"}
        async with httpx2.AsyncClient(headers=headers, trust_env=False) as client:
            answer = await client.post(url, json={"prompt": "w1 w2 w3", "max_tokens": 12}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["text"].split()) == 12
