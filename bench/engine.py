"""The engine's forward against the stock model's with a DynamicCache, one sequence and one row, interleaved."""

from __future__ import annotations

import argparse

from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session

GOALS = {"smollm2-135m": 1.10, "qwen2.5-coder-1.5b": 1.05}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=30, help="repetitions")
    parser.add_argument("--models", nargs="+", default=list(GOALS), help="named models or folders")
    parser.add_argument("--dtype", default="bf16", help="of the engine's weights")
    parser.add_argument("--threads", type=int, default=2)


def run(options: argparse.Namespace, session: Session) -> Result:
    from bench.engine_forward import measure
    from services.models import resolve

    for name in session.todo(options.models):
        arguments = argparse.Namespace(
            model=resolve(name),
            dtype=options.dtype,
            threads=options.threads,
            context=192,
            rows=1,
            sequences=[1, 16],
            repeats=options.prompts,
        )
        session.record(name, measure(arguments))
    ratios: dict[str, Ratio] = {}
    for row in session.rows:
        name, times = row["key"], row["times_ms"]
        over_stock = [ours / stock for ours, stock in zip(times["engine_1"], times["stock_1"], strict=True)]
        goal = Goal(GOALS[name], at_most=True) if name in GOALS else None
        ratios[f"engine.{name}.over_stock"] = ratio(over_stock, goal)
        gains = [16 * one / many for one, many in zip(times["engine_1"], times["engine_16"], strict=True)]
        ratios[f"engine.{name}.16_vs_1"] = ratio(gains)
    notes = (
        f"One sequence, one row, {options.dtype}, 192 tokens of context, {options.threads} threads; stock is "
        "transformers in bf16 with a DynamicCache. `16_vs_1`: tokens per second of a forward with 16 sequences against "
        "one."
    )
    return Result("Engine forward", ratios, notes)
