"""The engine's forward against the stock model's, on the real models."""

from __future__ import annotations

import argparse

from bench import report
from bench.engine_forward import measure
from services.models import resolve

GOALS = {"smollm2-135m": 1.10, "qwen2.5-coder-1.5b": 1.05}


def main(command: str, repeats: int = 30) -> None:
    raw = []
    ratios: dict[str, report.Ratio] = {}
    for name, goal in GOALS.items():
        arguments = argparse.Namespace(
            model=resolve(name), dtype="bf16", threads=2, context=192, rows=1, sequences=[1, 16], repeats=repeats
        )
        result = measure(arguments)
        raw.append(result)
        times = result["times_ms"]
        pairs = zip(times["engine_1"], times["stock_1"], strict=True)
        ratios[f"engine.{name}.over_stock"] = report.ratio([ours / stock for ours, stock in pairs], f"at most {goal}")
        pairs = zip(times["engine_1"], times["engine_16"], strict=True)
        ratios[f"engine.{name}.16_vs_1"] = report.ratio([16 * one / many for one, many in pairs])
    notes = (
        "One sequence, one row, bf16, 192 tokens of context, 2 threads; stock is transformers with a DynamicCache. "
        "`16_vs_1`: tokens per second of a forward with 16 sequences against one."
    )
    report.write("engine", "Engine forward", command, raw, ratios, notes)
