"""Overhead per round of scheduler and gRPC: table models, whose forward costs next to nothing, over real sockets.

The scheduler runs here, one target and one draft worker in processes of their own. An oracle drafter, draft length 4:
every round is draft, verify, commit. The overhead is the time per round less what the workers say they computed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench import report

sys.path.insert(0, str(report.ROOT / "tests"))

from scheduler.request import GenerationRequest, Started, Tokens
from scheduler.worker import AnyResult, Worker
from specdec.messages import Committed, DraftBlock
from specdec.params import SamplingParams
from tools.deployment import quick_config
from tools.socket_deployment import SocketDeployment

DRAFT_LENGTH = 4
GOAL_MS = 2.0


class Watch:
    """What the workers computed for each sequence since it was last asked, in seconds."""

    def __init__(self, deployment: SocketDeployment) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        pool = deployment.scheduler._pool  # the only place that sees every result
        self._deliver = pool._deliver
        pool._deliver = self._watched

    def taken(self, sequence_id: str) -> float:
        return self._seconds.pop(sequence_id, 0.0)

    def _watched(self, worker: Worker, results: Sequence[AnyResult]) -> None:
        for result in results:
            if isinstance(result.body, Committed):
                self._seconds[result.header.sequence_id] += result.body.step_time
            elif isinstance(result.body, DraftBlock):
                self._seconds[result.header.sequence_id] += result.body.draft_time
        self._deliver(worker, results)


async def overheads(deployment: SocketDeployment, watch: Watch, request: GenerationRequest) -> list[float]:
    """Milliseconds between the commits of one request less the workers' own, prefill and first round left out."""
    times: list[float] = []
    sequence_id, computed = "", 0.0
    async for event in deployment.scheduler.generate(request):
        if isinstance(event, Started):
            sequence_id = event.sequence_id
        elif isinstance(event, Tokens):
            computed += watch.taken(sequence_id)
            times.append((time.perf_counter() - computed) * 1e3)
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


async def measure(sequences: Sequence[int]) -> dict[str, list[float]]:
    request = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.0), max_tokens=400)
    found: dict[str, list[float]] = {}
    async with SocketDeployment(
        ("table_target --context-length 1024",),
        ("scripted_draft --script oracle --context-length 1024",),
        quick_config(draft_length=DRAFT_LENGTH),
    ) as deployment:
        watch = Watch(deployment)
        await overheads(deployment, watch, request)  # warms up
        for count in sequences:
            together = await asyncio.gather(
                *(overheads(deployment, watch, replace(request, token_ids=(1, 2, i))) for i in range(count))
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
    notes = "Time of a round less what target and draft worker computed in it. p99: " + ", ".join(
        f"{count} sequences {value:.1f} ms" for count, value in p99.items()
    )
    report.write("rounds", "Overhead per round", command, raw, ratios, notes + ".")
