"""Overhead per round of scheduler and gRPC: table models, whose forward costs next to nothing, over real sockets.

The scheduler runs here, one target and one draft worker in processes of their own. An oracle drafter, draft length 4:
every round is draft, verify, commit. The overhead is the time per round less what the workers say they computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench.journal import ROOT
from bench.ratios import Goal, quantile, ratio
from bench.session import Result, Session

sys.path.insert(0, str(ROOT / "tests"))

from scheduler.request import GenerationRequest, Started, Tokens
from scheduler.worker import AnyResult, Worker
from specdec.messages import Committed, DraftBlock
from specdec.params import SamplingParams
from tools.deployment import quick_config
from tools.socket_deployment import SocketDeployment

DRAFT_LENGTH = 4
COUNTS = (1, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=2, help="repetitions, each with one and with 16 sequences")
    parser.add_argument("--tokens", type=int, default=400, help="tokens per answer")


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    values = {n: [gap for row in session.rows for gap in row[str(n)]] for n in COUNTS}
    goals = {1: Goal(2, at_most=True, unit="ms")}
    ratios = {f"rounds.p50_ms.{n}_sequences": ratio(values[n], goals.get(n), resamples=200) for n in COUNTS}
    p99 = ", ".join(f"{n} sequences {quantile(values[n], 0.99):.1f} ms" for n in COUNTS)
    notes = f"Time of a round less what target and draft worker computed in it. p99: {p99}."
    return Result("Overhead per round", ratios, notes)


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
    return [round(later - earlier, 3) for earlier, later in itertools.pairwise(times[1:])]


async def _measure(options: argparse.Namespace, session: Session) -> None:
    request = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.0), max_tokens=options.tokens)
    async with SocketDeployment(
        ("table_target --context-length 1024",),
        ("scripted_draft --script oracle --context-length 1024",),
        quick_config(draft_length=DRAFT_LENGTH),
    ) as deployment:
        watch = Watch(deployment)
        await overheads(deployment, watch, request)  # warms up
        for key in session.todo([f"repetition {i}" for i in range(options.prompts)]):
            first = int(key.split()[1]) + 2
            gaps: dict[str, list[float]] = {}
            for count in COUNTS:
                together = await asyncio.gather(
                    *(overheads(deployment, watch, replace(request, token_ids=(1, first, i))) for i in range(count))
                )
                gaps[str(count)] = [gap for one in together for gap in one]
            session.record(key, gaps)
