"""Acceptance of the three accept rules on the Qwen2.5-Coder pair, on HumanEval, at two temperatures.

Every prompt is answered under every rule and temperature before the next one. Under `rejection` and `block` answers
cannot be repeated by seed, so each is one draw.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, Literal

from bench import report
from bench.deployment import Up
from bench.pair import DRAFT, DRAFT_LENGTH, TARGET, THREADS, prompts

Rule = Literal["invariant", "rejection", "block"]
RULES: tuple[Rule, ...] = ("invariant", "rejection", "block")
TEMPERATURES = (0.7, 1.0)


async def measure(data: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with Up("--model", TARGET, "--draft-model", DRAFT, "--threads", str(THREADS)) as up:
        for i, prompt in enumerate(prompts(data, count)):
            for temperature in TEMPERATURES:
                for rule in RULES:
                    answer = await up.client.complete(
                        messages=[{"role": "user", "content": prompt}],
                        max_tokens=tokens,
                        min_tokens=tokens,
                        temperature=temperature,
                        accept_rule=rule,
                        seed=i if rule == "invariant" else None,
                        speculation="on",
                        draft_length=DRAFT_LENGTH,
                    )
                    figures = answer.finished.speculation
                    rows.append(
                        {
                            "prompt": i,
                            "temperature": temperature,
                            "rule": rule,
                            "drafted": figures.num_draft_tokens,
                            "accepted": figures.num_accepted_tokens,
                            "mean_acceptance_length": figures.mean_acceptance_length,
                        }
                    )
            print(f"prompt {i + 1} of {count}", file=sys.stderr)
    return rows


def main(command: str, data: Path, count: int = 20, tokens: int = 32) -> None:
    rows = asyncio.run(measure(data, count, tokens))
    ratios: dict[str, report.Ratio] = {}
    for temperature in TEMPERATURES:
        for rule in RULES:
            lengths = [
                row["mean_acceptance_length"]
                for row in rows
                if row["rule"] == rule and row["temperature"] == temperature
            ]
            ratios[f"acceptance_length.T{temperature}.{rule}"] = report.mean(lengths)
    totals = [
        f"T {temperature} {rule} {_rate(rows, rule, temperature):.3f}" for temperature in TEMPERATURES for rule in RULES
    ]
    notes = (
        f"Committed tokens per verify, mean over {count} HumanEval prompts of {tokens} tokens, bf16, draft length "
        f"{DRAFT_LENGTH}. Accepted of drafted candidates: {', '.join(totals)}."
    )
    report.write("acceptance", "Acceptance of the accept rules", command, rows, ratios, notes)


def _rate(rows: list[dict[str, Any]], rule: str, temperature: float) -> float:
    mine = [row for row in rows if row["rule"] == rule and row["temperature"] == temperature]
    return float(sum(row["accepted"] for row in mine) / sum(row["drafted"] for row in mine))
