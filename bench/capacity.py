"""What one scheduler process can do: rounds per second of its CPU time, and how long it holds a round.

Table models whose forward costs little, an oracle drafter, draft length 4, every answer streamed through the public
gRPC API. CPU time is that of the scheduler process alone. How long a round is held is measured in a second scheduler
process in front of the same workers: draft received to verify sent, and verdict received to event written.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from bench.plots import Bars, Lines
from bench.ratios import Goal, Ratio, quantile, ratio
from bench.session import Result, Session

COUNTS = (1, 16, 64)
DRAFT_LENGTH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=6, help="repetitions, each with 1, 16 and 64 sequences")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per answer")
    parser.add_argument("--policy", default="fixed", choices=("fixed", "goodput", "threshold"))


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    rates = [row["counts"]["64"]["rounds"] / row["counts"]["64"]["cpu_seconds"] for row in rows]
    costs = {n: [_cost(row["counts"][str(n)]) for row in rows] for n in COUNTS}
    ratios: dict[str, Ratio] = {"capacity.rounds_per_cpu_second.64": ratio(rates, Goal(5000))}
    for n in COUNTS:
        ratios[f"capacity.cpu_us_per_round.{n}"] = ratio(costs[n])
    growth = [many / one for one, many in zip(costs[1], costs[64], strict=True)]
    ratios["capacity.cpu_per_round.64_vs_1"] = ratio(growth, Goal(1.0, at_most=True))
    for n in COUNTS:
        held = [ms for row in rows for ms in row["counts"][str(n)]["held_ms"]]
        ratios[f"capacity.overhead_ms_p50.{n}"] = ratio(held, Goal(1.0, at_most=True, unit="ms"), resamples=200)
    charts = (
        Lines(
            "capacity",
            "CPU time of the scheduler process per sequence and round",
            "sequences",
            "microseconds",
            {"public stream included": [(n, statistics.median(costs[n])) for n in COUNTS]},
            doubling=True,
        ),
        Bars(
            "capacity_overhead",
            "How long the scheduler holds a round (10 % to 90 % of rounds)",
            "ms",
            {f"{n} sequences": _spread(rows, n) for n in COUNTS},
        ),
    )
    notes = (
        f"{len(rows)} repetitions of {options.tokens} tokens per sequence, draft length {DRAFT_LENGTH}, all accepted, "
        f"policy {options.policy}. {_parts(rows)} {session.stopped_early}".rstrip()
    )
    return Result("Capacity of one scheduler process", ratios, notes, charts)


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.table_system import TableSystem

    settings = {"policy": options.policy, "draft_length": DRAFT_LENGTH, "max_sequences": 256}
    async with TableSystem(
        ("table_target --context-length 1024",),
        ("scripted_draft --script oracle --context-length 1024",),
        {"bare": settings, "watched": settings},
        watched=("watched",),
    ) as system:
        await _together(system.schedulers["bare"].client, max(COUNTS), 40, "warm")
        await _together(system.schedulers["watched"].client, max(COUNTS), 40, "warm")
        for key in session.todo([f"repetition {i}" for i in range(options.prompts)]):
            counts = {str(n): await _one(system, n, options.tokens, key) for n in COUNTS}
            session.record(key, {"counts": counts})


async def _one(system: Any, count: int, tokens: int, key: str) -> dict[str, Any]:
    bare, watched = system.schedulers["bare"], system.schedulers["watched"]
    before = bare.cpu_seconds
    # The CPU clock ticks in 10 ms: few sequences answer often enough for it.
    rounds = sum([await _together(bare.client, count, tokens, key) for _ in range(max(1, 8 // count))])
    cpu_seconds = bare.cpu_seconds - before
    seen = len(watched.round_times())
    await _together(watched.client, count, tokens, key)
    times = watched.round_times()[seen:]
    return {
        "rounds": rounds,
        "cpu_seconds": round(cpu_seconds, 3),
        "held_ms": _thinned([a + b for a, b in times]),
        "to_verify_ms": round(statistics.median(a for a, _ in times), 4),
        "to_event_ms": round(statistics.median(b for _, b in times), 4),
    }


async def _together(client: Any, count: int, tokens: int, key: str) -> int:
    """Rounds of `count` answers at once."""
    seed = sum(key.encode())
    answers = await asyncio.gather(
        *(
            client.complete(
                token_ids=(1 + seed % 50, 2 + i % 60, 3 + i // 60),
                max_tokens=tokens,
                temperature=0.0,
                ignore_eos=True,
                speculation="auto",
            )
            for i in range(count)
        )
    )
    figures = [answer.finished.speculation for answer in answers]
    return sum(one.num_drafts for one in figures)


def _cost(count: dict[str, Any]) -> float:
    """Microseconds of CPU time per round."""
    return float(count["cpu_seconds"] / count["rounds"] * 1e6)


def _thinned(values: list[float], most: int = 400) -> list[float]:
    """At most that many, evenly taken from the ordered values: the same distribution in less space."""
    ordered = sorted(values)
    if len(ordered) > most:
        ordered = [ordered[int((i + 0.5) * len(ordered) / most)] for i in range(most)]
    return [round(value, 4) for value in ordered]


def _spread(rows: list[dict[str, Any]], count: int) -> list[float]:
    held = [ms for row in rows for ms in row["counts"][str(count)]["held_ms"]]
    return [quantile(held, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]


def _parts(rows: list[dict[str, Any]]) -> str:
    told = []
    for n in COUNTS:
        counts = [row["counts"][str(n)] for row in rows]
        to_verify = statistics.median(count["to_verify_ms"] for count in counts)
        to_event = statistics.median(count["to_event_ms"] for count in counts)
        held = [ms for count in counts for ms in count["held_ms"]]
        told.append(f"{n} sequences {to_verify:.2f} + {to_event:.2f} ms (p99 of both {quantile(held, 0.99):.1f})")
    return f"Draft to verify + verdict to event, medians: {', '.join(told)}."
