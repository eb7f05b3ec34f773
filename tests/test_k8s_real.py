"""The rendered overlay local-cpu with a real model: what its init container verified is what answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.manifest_table import Client, local_cluster


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_real_model_answers_a_prompt(tmp_path: Path, smollm2: Path) -> None:
    volume = tmp_path / "volume"
    (volume / "models").mkdir(parents=True)
    (volume / "models" / "smollm2-135m").symlink_to(smollm2)
    outrider = (sys.executable, "-m", "services.cli.main")
    async with local_cluster(tmp_path, outrider=outrider, models=volume) as cluster:
        client = Client.of(cluster)
        answer = await client.ask("The capital of France is", 8)
        assert "Paris" in answer.json()["choices"][0]["text"]
        for pod in cluster.pods["outrider-target"]:
            assert "smollm2-135m: whole" in pod.log()
