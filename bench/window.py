"""Drafting ahead (window 4, blocks of 5 of which the first guesses the bonus) against stop-and-wait (blocks of 4).

Table models in processes of their own: a block is drafted in 10 ms whatever its length, those of a fan-out beside it
in the same 10 ms, and verified in 10 ms. The scheduler reaches them through a proxy that adds a delay to each hop; a
round has four. Greedy, one sequence. Where the drafter errs, a set share has the right token as its runner-up.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.journal import ROOT
from bench.plots import Bars
from bench.ratios import Goal, Ratio, quantile, ratio
from bench.session import Result, Session

sys.path.insert(0, str(ROOT / "tests"))

from scheduler.config import Policy, SchedulerConfig
from scheduler.request import Finished, GenerationRequest, Tokens
from scheduler.scheduler import Scheduler
from services.links import link_factory
from specdec.params import SamplingParams
from tools.deployment import SystemUnderTest, quick_config
from tools.recorder import MemoryRecorder
from tools.socket_deployment import SocketDeployment
from tools.waiting import until

SECONDS = 0.010
DELAYS_MS = (0, 5)
ACCEPTANCES = (0.95, 0.9)
GOALS = {(0.95, 0): 1.5, (0.95, 5): 2.2, (0.9, 0): 1.3, (0.9, 5): 1.65}
IDLE_GOAL = Goal(0.5, at_most=True, unit="ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=6, help="answers of each contestant in each setting")
    parser.add_argument("--tokens", type=int, default=400, help="tokens per answer")
    parser.add_argument("--window", type=int, default=4, help="blocks in flight when drafting ahead")
    parser.add_argument("--fan-out", type=int, default=3, help="blocks more for each in flight, of one contestant")
    parser.add_argument(
        "--runner-up", type=float, default=0.59, help="share of errors whose correction is the drafter's runner-up"
    )
    parser.add_argument("--width", type=int, default=1, help="siblings; above 1 the drafter offers trees")
    parser.add_argument("--goodput", action="store_true", help="also let the goodput policy choose")


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    ratios: dict[str, Ratio] = {}
    speeds: dict[str, list[float]] = {}
    for acceptance in ACCEPTANCES:
        for delay in DELAYS_MS:
            cell = [row["cells"][_name(acceptance, delay)] for row in session.rows]
            for name in cell[0]:
                label = f"{name}, acceptance {acceptance:g}, {delay} ms"
                speeds[label] = [one[name]["rate"] for one in cell]
            ratios |= _ratios(cell, acceptance, delay)
    idle = [ms for row in session.rows for cell in row["cells"].values() for ms in cell["ahead"]["idle_ms"]]
    gaps = [ms for row in session.rows for cell in row["cells"].values() for ms in cell["ahead"]["gap_ms"]]
    if idle:
        ratios["window.idle_ms_p50"] = ratio(idle, IDLE_GOAL, resamples=200)
        ratios["window.gap_ms_p50"] = ratio(gaps, resamples=200)
    chart = Bars("window", "Stop-and-wait and drafting ahead, table models", "tokens per second", speeds)
    notes = (
        f"{len(session.rows)} answers of {options.tokens} tokens each. `vs_stop_and_wait`: throughput; `fan_out`: "
        f"ahead with {options.fan_out} branches of each block, where {options.runner_up:.0%} of the corrections are "
        "the drafter's runner-up; `hits_per_verify`: verifies whose block lay ready; `of_implied`: "
        "of what the run's own hits allow if a hit takes the longer of draft and verify and a miss takes both and four "
        "hops. `idle`: how long the target waits for work between the two verifies of a hit "
        f"({len(idle)} hits; p99 {quantile(idle, 0.99) if idle else 0:.1f} ms); `gap`: between the two forwards, "
        f"accepting included. {session.stopped_early}"
    )
    return Result("Drafting ahead over a network", ratios, notes.rstrip(), (chart,))


def _ratios(cell: list[dict[str, Any]], acceptance: float, delay: int) -> dict[str, Ratio]:
    name = _name(acceptance, delay)
    found: dict[str, Ratio] = {}
    for contestant in (key for key in cell[0] if key != "stop_and_wait"):
        speedups = [one[contestant]["rate"] / one["stop_and_wait"]["rate"] for one in cell]
        key = "window.vs_stop_and_wait" if contestant == "ahead" else f"window.{contestant}_vs_stop_and_wait"
        goal = Goal(GOALS[acceptance, delay]) if contestant == "ahead" else None
        found[f"{key}.{name}"] = ratio(speedups, goal)
    for contestant in ("ahead", "fan_out"):
        shares = [one[contestant]["hits"] / one[contestant]["rounds"] for one in cell if contestant in one]
        if shares:
            found[f"window.{contestant}_hits_per_verify.{name}"] = ratio(shares)
    found[f"window.of_implied.{name}"] = ratio([_of_implied(one["ahead"], delay) for one in cell], Goal(0.95))
    found[f"window.stop_and_wait_of_implied.{name}"] = ratio([_of_implied(one["stop_and_wait"], delay) for one in cell])
    return found


def _of_implied(answer: dict[str, Any], delay: int) -> float:
    miss = 2 * SECONDS + 4 * delay / 1e3
    implied = answer["hits"] * SECONDS + (answer["rounds"] - answer["hits"]) * miss
    return float(implied / answer["seconds"])


def _name(acceptance: float, delay: int) -> str:
    return f"{acceptance:g}_{delay}ms"


@dataclass(slots=True)
class _System:
    """Schedulers by contestant in front of one pair of workers; idle_file: what the target tells of itself."""

    deployment: SocketDeployment
    schedulers: dict[str, SystemUnderTest]
    idle_file: Path

    def set_delay(self, seconds: float) -> None:
        for proxy in self.deployment.proxies:
            proxy.upward.delay = proxy.downward.delay = seconds


def _configs(options: argparse.Namespace) -> dict[str, SchedulerConfig]:
    config = replace(quick_config(), width=options.width)
    configs = {
        "stop_and_wait": replace(config, draft_length=4, window=1),
        "ahead": replace(config, draft_length=5, window=options.window),
    }
    if options.fan_out:
        configs["fan_out"] = replace(configs["ahead"], fan_out=options.fan_out)
    if options.goodput:
        configs["goodput"] = replace(config, policy=Policy.GOODPUT, draft_length=5, max_draft_length=5, max_window=8)
    return configs


async def _measure(options: argparse.Namespace, session: Session) -> None:
    async with AsyncExitStack() as stack:
        systems = {a: await stack.enter_async_context(_system(a, options)) for a in ACCEPTANCES}
        for system in systems.values():
            for contestant in system.schedulers.values():
                await _answer(contestant, 0, 100)
        for key in session.todo([f"answer {i}" for i in range(options.prompts)]):
            number = int(key.split()[1]) + 1
            cells: dict[str, Any] = {}
            for acceptance, system in systems.items():
                for delay in DELAYS_MS:
                    system.set_delay(delay / 1e3)
                    cells[_name(acceptance, delay)] = await _all(system, number, options.tokens)
            session.record(key, {"cells": cells})


async def _all(system: _System, number: int, tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, contestant in system.schedulers.items():
        seen = len(system.idle_file.read_text().splitlines())
        answer = await _answer(contestant, number, tokens)
        lines = system.idle_file.read_text().splitlines()[seen:]
        found[name] = answer | _idle(lines, answer["hits"])
    return found


async def _answer(system: SystemUnderTest, number: int, tokens: int) -> dict[str, Any]:
    request = GenerationRequest((1, 2, 3, number), SamplingParams(temperature=0.0), max_tokens=tokens)
    arrivals: list[tuple[float, int]] = []
    finished: Finished | None = None
    async for event in system.scheduler.generate(request):
        if isinstance(event, Tokens):
            arrivals.append((time.perf_counter(), len(event.token_ids)))
        elif isinstance(event, Finished):
            finished = event
    if finished is None:
        raise RuntimeError("an answer ended without its last event")
    summary = finished.speculation
    seconds = arrivals[-1][0] - arrivals[0][0]
    return {
        "rate": round(sum(count for _, count in arrivals[1:]) / seconds, 3),
        "seconds": round(seconds, 4),
        "rounds": len(arrivals) - 1,
        "hits": summary.num_ahead_hits + summary.num_fan_out_hits,
        "misses": summary.num_ahead_misses,
        "fan_out_hits": summary.num_fan_out_hits,
        "fan_out_misses": summary.num_fan_out_misses,
        "acceptance_rate": round(summary.acceptance_rate or 0.0, 4),
        "plain_steps": summary.num_plain_steps,
    }


def _idle(lines: list[str], hits: int) -> dict[str, Any]:
    """Milliseconds before the verifies that continued a hit: as many of the shortest waits as there were hits, since
    every other verify waited for a whole draft."""
    forwards = [[float(word) for word in line.split()] for line in lines]
    verifies = sorted((waited, gap) for waited, gap, rows in forwards[1:] if rows > 1)[:hits]
    return {
        "idle_ms": [round(waited * 1e3, 3) for waited, _ in verifies],
        "gap_ms": [round(gap * 1e3, 3) for _, gap in verifies],
        "median_forwards_apart_ms": round(statistics.median(gap for _, gap, _ in forwards) * 1e3, 3) if forwards else 0,
    }


@asynccontextmanager
async def _system(acceptance: float, options: argparse.Namespace) -> AsyncIterator[_System]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="otw"))
        idle_file = Path(folder) / "idle"
        command = f"bench.timed_workers --seconds {SECONDS}"
        configs = _configs(options)
        deployment = await stack.enter_async_context(
            SocketDeployment(
                (f"{command} --role target --idle-file {idle_file}",),
                (f"{command} --role draft --agreement {acceptance} --runner-up {options.runner_up}",),
                configs["stop_and_wait"],
                proxied=True,
            )
        )
        schedulers: dict[str, SystemUnderTest] = {"stop_and_wait": deployment}
        for name in (name for name in configs if name != "stop_and_wait"):
            schedulers[name] = await stack.enter_async_context(_further(deployment, name, configs[name]))
        yield _System(deployment, schedulers, idle_file)


@asynccontextmanager
async def _further(deployment: SocketDeployment, name: str, config: SchedulerConfig) -> AsyncIterator[SystemUnderTest]:
    """One more scheduler in front of the same workers."""
    recorder = MemoryRecorder()
    scheduler = Scheduler(replace(config, scheduler_id=name), link_factory(), recorder)
    system = SystemUnderTest(scheduler, recorder)
    await scheduler.start()
    try:
        for process, address in zip(deployment.processes, deployment.addresses, strict=True):
            scheduler.add_worker(process.role, address)
        await until(system.settled, "every worker is ready or refused")
        yield system
    finally:
        await scheduler.close()
