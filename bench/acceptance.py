"""Acceptance of the three accept rules on the Qwen2.5-Coder pair, on HumanEval, at two temperatures.

Every prompt is answered under every rule and temperature before the next one. Under `rejection` and `block` answers
cannot be repeated by seed, so each is one draw.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from bench.pair import add_pair_arguments, up_arguments
from bench.ratios import Ratio, mean
from bench.session import Result, Session
from bench.workloads import add_data_argument, human_eval
from outrider.request import AcceptRule

RULES: tuple[AcceptRule, ...] = ("invariant", "rejection", "block")
TEMPERATURES = (0.7, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=20, help="HumanEval prompts")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per answer")
    add_pair_arguments(parser)
    add_data_argument(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = [answer for row in session.rows for answer in row["answers"]]
    cells = [(temperature, rule) for temperature in TEMPERATURES for rule in RULES]
    ratios: dict[str, Ratio] = {}
    for temperature, rule in cells:
        lengths = [row["mean_acceptance_length"] for row in _of(rows, rule, temperature)]
        ratios[f"acceptance_length.T{temperature}.{rule}"] = mean(lengths)
    totals = [f"T {temperature} {rule} {_rate(rows, rule, temperature):.3f}" for temperature, rule in cells]
    notes = (
        f"Committed tokens per verify, mean over {len(session.rows)} HumanEval prompts of {options.tokens} tokens, "
        f"draft length {options.draft_length}. Accepted of drafted candidates: {', '.join(totals)}."
    )
    notes = f"{notes} {session.stopped_early}".rstrip()
    return Result("Acceptance of the accept rules", ratios, notes)


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.deployment import Up

    async with Up(*up_arguments(options)) as up:
        prompts = human_eval(options.data, options.prompts)
        for key in session.todo([f"prompt {i}" for i in range(len(prompts))]):
            number = int(key.split()[1])
            cells = [(temperature, rule) for temperature in TEMPERATURES for rule in RULES]
            answers = [await _one(up, prompts[number], number, options, *cell) for cell in cells]
            session.record(key, {"answers": answers})


async def _one(
    up: Any, prompt: str, seed: int, options: argparse.Namespace, temperature: float, rule: AcceptRule
) -> dict[str, Any]:
    answer = await up.client.complete(
        messages=[{"role": "user", "content": prompt}],
        max_tokens=options.tokens,
        min_tokens=options.tokens,
        temperature=temperature,
        accept_rule=rule,
        seed=seed if rule == "invariant" else None,
        speculation="on",
        draft_length=options.draft_length,
    )
    figures = answer.finished.speculation
    return {
        "temperature": temperature,
        "rule": rule,
        "drafted": figures.num_draft_tokens,
        "accepted": figures.num_accepted_tokens,
        "mean_acceptance_length": figures.mean_acceptance_length,
    }


def _of(rows: list[dict[str, Any]], rule: str, temperature: float) -> list[dict[str, Any]]:
    return [row for row in rows if row["rule"] == rule and row["temperature"] == temperature]


def _rate(rows: list[dict[str, Any]], rule: str, temperature: float) -> float:
    mine = _of(rows, rule, temperature)
    return float(sum(row["accepted"] for row in mine) / sum(row["drafted"] for row in mine))
