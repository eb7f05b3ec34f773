"""Overhead per round of scheduler and gRPC: table models, whose forward costs next to nothing, over real sockets.

The scheduler runs here, one target and one draft worker in processes of their own. An oracle drafter, draft length 4:
every round is draft, verify, commit. The time per round less the workers' own time is the overhead.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from bench import report

sys.path.insert(0, str(report.ROOT / "tests"))

from scheduler.request import GenerationRequest, Tokens
from specdec.params import SamplingParams
from tools.deployment import quick_config
from tools.socket_deployment import SocketDeployment

DRAFT_LENGTH = 4
GOAL_MS = 2.0


async def gaps(deployment: SocketDeployment, request: GenerationRequest) -> list[float]:
    """Milliseconds between the commits of one request, prefill and first round left out."""
    times: list[float] = []
    async for event in deployment.scheduler.generate(request):
        if isinstance(event, Tokens):
            times.append(time.perf_counter() * 1e3)
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


async def measure(sequences: Sequence[int]) -> dict[str, list[float]]:
    request = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.0), max_tokens=400)
    found: dict[str, list[float]] = {}
    async with SocketDeployment(
        ("table_target --context-length 1024",),
        ("scripted_draft --script oracle --context-length 1024",),
        quick_config(draft_length=DRAFT_LENGTH),
    ) as deployment:
        await gaps(deployment, request)  # warms up
        for count in sequences:
            together = await asyncio.gather(
                *(gaps(deployment, replace(request, token_ids=(1, 2, i))) for i in range(count))
            )
            found[str(count)] = [gap for one in together for gap in one]
    return found


def main(command: str) -> None:
    raw = asyncio.run(measure((1, 16)))
    ratios = {
        f"rounds.p50_ms.{count}_sequences": report.ratio(
            values, f"at most {GOAL_MS:g} ms" if count == "1" else "", resamples=200
        )
        for count, values in raw.items()
    }
    p99 = {count: statistics.quantiles(values, n=100)[98] for count, values in raw.items()}
    notes = "The whole time of a round, table forwards included. p99: " + ", ".join(
        f"{count} sequences {value:.1f} ms" for count, value in p99.items()
    )
    report.write("rounds", "Overhead per round", command, raw, ratios, notes + ".")
