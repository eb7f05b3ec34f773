"""Spec-Bench on the Qwen pair: every category, the policy's choice against plain decoding and fixed draft lengths.

In no category should the policy be slower than the best of its own plain and fixed lengths. Greedy; first turns only.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from bench.contestants import Contestant, Ours, Question, ask_all, rates
from bench.pair import add_pair_arguments, up_arguments
from bench.plots import Bars
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session
from bench.workloads import add_data_argument, spec_bench

GOAL = Goal(0.98)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=1, help="questions of each category")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 6], help="fixed draft lengths to compare with")
    parser.add_argument("--policy", default="goodput", choices=("goodput", "threshold"))
    add_pair_arguments(parser)
    add_data_argument(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    categories = list(dict.fromkeys(row["category"] for row in session.rows))
    ratios: dict[str, Ratio] = {}
    speedup: dict[str, list[float]] = {}
    for category in categories:
        rows = [row for row in session.rows if row["category"] == category]
        others = [name for name in rows[0]["answers"] if name != "outrider"]
        best = max(others, key=lambda name: statistics.median(rates(rows, name)))
        ratios[f"categories.vs_best_fixed.{category}"] = ratio(_shares(rows, best), GOAL)
        ratios[f"categories.vs_plain.{category}"] = ratio(_shares(rows, "own_plain"))
        speedup[category] = _shares(rows, "own_plain")
    chart = Bars("categories", "Spec-Bench: the policy's choice against plain", "times as fast", speedup)
    notes = (
        f"{len(session.rows)} first turns of {options.tokens} tokens, policy {options.policy}, compared with plain and "
        f"draft lengths {', '.join(map(str, options.lengths))}; `best_fixed` is the one with the highest median in the "
        f"category. {session.stopped_early}"
    )
    return Result("Spec-Bench by category", ratios, notes.rstrip(), (chart,))


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.deployment import Up

    session.say("loading models")
    async with Up(*up_arguments(options), "--policy", options.policy) as up:
        contestants: list[Contestant] = [Ours("outrider", up.client, "auto"), Ours("own_plain", up.client, "off")]
        contestants += [Ours(f"length {length}", up.client, "on", length) for length in options.lengths]
        for contestant in contestants:
            await contestant.answer(Question("Count from one to twenty.", 32))
        questions = spec_bench(options.data, options.prompts)
        for key in session.todo([f"question {i}" for i in range(len(questions))]):
            number = int(key.split()[1])
            category, prompt = questions[number]
            answers = await ask_all(contestants, Question(prompt, options.tokens), number)
            session.record(key, {"category": category, "answers": answers})


def _shares(rows: list[dict[str, Any]], other: str) -> list[float]:
    return [row["answers"][other]["seconds"] / row["answers"]["outrider"]["seconds"] for row in rows]
