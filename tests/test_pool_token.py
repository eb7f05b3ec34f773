"""A Ray cluster lets in who has its token, and says in one line what is wrong to others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.pools.ray_cluster import WRONG_TOKEN
from tools.up import ROOT, environment

pytestmark = pytest.mark.slow  # Ray tries for 20 s

CLUSTER = """
import json, sys
import ray
context = ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
                   logging_level="error", _temp_dir=sys.argv[1])
print(json.dumps(context.address_info["gcs_address"]), flush=True)
sys.stdin.read()
ray.shutdown()
"""
CONNECT = """
import asyncio, sys
from pathlib import Path
from services.pools.ray_cluster import RayCluster
from services.start_error import StartError

async def main():
    cluster = RayCluster(sys.argv[1], Path())
    try:
        await cluster.connect()
        print("connected")
    except StartError as error:
        print(error)
    await cluster.close()

asyncio.run(main())
"""
RIGHT = "a-token-of-the-tests-0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Cluster:
    address: str

    def connect(self, token: str) -> str:
        """What a process with this token says of it."""
        result = subprocess.run(
            [sys.executable, "-c", CONNECT, self.address],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env=environment(RAY_AUTH_TOKEN=token, RAY_AUTH_MODE="token"),
            check=False,
        )
        assert "Traceback" not in result.stderr
        return result.stdout.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = Path("/tmp") / f"ot-{tmp_path_factory.mktemp('ray').parent.name[-8:]}"
    command = [sys.executable, "-c", CLUSTER, str(folder)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(RAY_AUTH_TOKEN=RIGHT, RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0"),
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield Cluster(json.loads(process.stdout.readline()))
        process.stdin.close()


def test_the_right_token_is_let_in(cluster: Cluster) -> None:
    assert cluster.connect(RIGHT) == "connected"


def test_a_wrong_token_is_refused_in_one_line_that_says_what_to_do(cluster: Cluster) -> None:
    said = cluster.connect("another-token-0123456789abcdef")
    assert said == WRONG_TOKEN.format(address=cluster.address)
