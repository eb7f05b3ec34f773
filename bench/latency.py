"""How long a user waits, on SmolLM2: until the first token and from token to token, of one request at a time.

Through the public gRPC stream; the prompts are long and short in turn, so that prefill shows.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from bench.contestants import Contestant, Ours, Question, ask_all
from bench.load import add_small_arguments
from bench.plots import Bars
from bench.ratios import Ratio, quantile, ratio
from bench.session import Result, Session

SENTENCE = "The outrider left the camp before dawn and rode along the river until the sun stood over the hills. "
SHORT = "Tell me one fact about the number {}."
LONG = SENTENCE * 12 + "What did the outrider do? Mention the number {}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=10, help="prompts, short and long in turn")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    add_small_arguments(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    ratios: dict[str, Ratio] = {}
    rates: dict[str, list[float]] = {}
    for kind in ("short", "long"):
        for name in ("plain", "speculative"):
            answers = [row["answers"][name] for row in session.rows if row["kind"] == kind]
            if not answers:
                continue
            ratios[f"latency.first_token_ms.{kind}.{name}"] = ratio([1e3 * one["first_seconds"] for one in answers])
            ratios[f"latency.token_ms.{kind}.{name}"] = ratio([1e3 / one["decode_rate"] for one in answers])
            rates[f"{kind} prompt, {name}"] = [one["decode_rate"] for one in answers]
    notes = (
        f"{len(session.rows)} prompts of {options.model}, drafter ngram, {options.tokens} tokens. "
        f"{_slowest(session.rows)} {session.stopped_early}"
    )
    chart = Bars("latency", f"One request at a time, {options.model}", "tokens per second behind the first", rates)
    return Result("Latency of one request", ratios, notes.rstrip(), (chart,))


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.deployment import Up
    from bench.load import up_arguments

    async with Up(*up_arguments(options)) as up:
        contestants: list[Contestant] = [
            Ours("plain", up.client, "off"),
            Ours("speculative", up.client, "auto"),
        ]
        for contestant in contestants:
            await contestant.answer(Question("Hello.", 8))
        for key in session.todo([f"prompt {i}" for i in range(options.prompts)]):
            number = int(key.split()[1])
            kind, prompt = ("long", LONG) if number % 2 else ("short", SHORT)
            answers = await ask_all(contestants, Question(prompt.format(number), options.tokens), number // 2)
            session.record(key, {"kind": kind, "answers": answers})


def _slowest(rows: list[dict[str, Any]]) -> str:
    waits = [1e3 * answer["first_seconds"] for row in rows for answer in row["answers"].values()]
    return f"Slowest first token {quantile(waits, 1.0):.0f} ms."
