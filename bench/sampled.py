"""What drawing costs on the Qwen pair: verifies per second at a temperature, top-p and seeds against greedy ones."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from bench.contestants import Contestant, Question
from bench.pair import add_pair_arguments, speculative, up_arguments
from bench.ratios import Goal, ratio
from bench.session import Result, Session
from bench.workloads import add_data_argument, human_eval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=6, help="HumanEval prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.9)
    add_pair_arguments(parser)
    add_data_argument(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    shares = [_verifies(row["answers"]["sampled"]) / _verifies(row["answers"]["greedy"]) for row in rows]
    ratios = {"qwen.sampled_vs_greedy_verifies": ratio(shares, Goal(0.93))}
    notes = (
        f"{len(rows)} HumanEval prompts of {options.tokens} tokens; temperature {options.temperature:g}, top-p "
        f"{options.top_p:g}, seeded; verifies per second behind the first tokens. {session.stopped_early}"
    )
    return Result("Drawing against greedy on the Qwen pair", ratios, notes.rstrip())


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.deployment import Up

    session.say("loading models")
    async with Up(*up_arguments(options)) as up:
        contestant: Contestant = speculative("outrider", up.client, options.draft_length)
        prompts = human_eval(options.data, options.prompts)
        await contestant.answer(Question("Say hello.", 8))
        for key in session.todo([f"prompt {i}" for i in range(len(prompts))]):
            number = int(key.split()[1])
            greedy = Question(prompts[number], options.tokens)
            sampled = Question(prompts[number], options.tokens, options.temperature, options.top_p, seed=number)
            both = {"greedy": greedy, "sampled": sampled}
            order = list(both) if number % 2 else list(both)[::-1]
            answers = {name: (await contestant.answer(both[name])).row() for name in order}
            session.record(key, {"answers": answers})


def _verifies(answer: dict[str, Any]) -> float:
    """Per second: of a block there is one event."""
    per_verify = answer["tokens"] / (answer["drafts"] + answer["plain_steps"])
    return float(answer["decode_rate"] / per_verify)
