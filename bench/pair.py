"""The Qwen2.5-Coder pair on HumanEval: ours plain and speculative, transformers plain, assisted and with prompt lookup,
and vLLM and llama.cpp where they are installed (see `python -m bench.peers`).

All contestants answer prompt i before any answers prompt i + 1, in turn on the same cores. Ours are separate processes
behind gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from contextlib import AsyncExitStack
from typing import Any

from bench.contestants import Contestant, Ours, Question, ask_all, rates, speedups
from bench.plots import Bars
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session
from bench.workloads import add_data_argument, human_eval

TARGET = "qwen2.5-coder-1.5b"
DRAFT = "qwen2.5-coder-0.5b"
DRAFT_LENGTH = 5
GOALS = {
    "own_plain": Goal(1.6),
    "transformers_plain": Goal(3.2),
    "transformers_assisted_best": Goal(2.0),
    "vllm_best": Goal(1.1),
    "llama_cpp_plain": Goal(0.9),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from bench.peers.known import NAMES
    from bench.stock import KINDS

    parser.add_argument("--prompts", type=int, default=6, help="HumanEval prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--stock", nargs="*", choices=KINDS, default=list(KINDS), help="of transformers")
    parser.add_argument("--peers", nargs="*", choices=NAMES, default=[], help="others, each in its own environment")
    add_pair_arguments(parser)
    parser.add_argument("--policy", action="store_true", help="also let the policy choose, on the same deployment")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more deployment of ours, with these flags of `outrider up` beside those of --up (memory: 10 GB each)",
    )
    add_data_argument(parser)


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of the pair takes."""
    parser.add_argument("--draft-length", type=int, default=DRAFT_LENGTH, help="candidates; 0: the policy chooses")
    parser.add_argument("--draft-quantization", default="auto", choices=("auto", "none", "int4"), help="of our draft")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant")
    parser.add_argument("--up", default="", metavar="FLAGS", help='further flags of `outrider up`, e.g. "--dtype bf16"')


def up_arguments(options: argparse.Namespace, more: str = "") -> tuple[str, ...]:
    """Flags of `outrider up` for the pair."""
    flags = ("--threads", str(options.threads), "--draft-quantization", options.draft_quantization)
    return ("--model", TARGET, "--draft-model", DRAFT, *flags, *shlex.split(options.up), *shlex.split(more))


def speculative(name: str, client: Any, draft_length: int) -> Ours:
    """Always on with a fixed length, or as the policy likes it."""
    return Ours(name, client, "on" if draft_length else "auto", draft_length or None)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    names = list(rows[0]["answers"])
    ratios = {f"qwen.outrider_vs_{key}": value for key, value in _ratios(rows, names).items()}
    for name in names:
        ratios[f"qwen.tokens_per_second.{name}"] = ratio(rates(rows, name))
    chart = Bars("pair", f"HumanEval, greedy, {options.tokens} tokens", "tokens per second", _by_speed(rows, names))
    return Result("Qwen2.5-Coder 1.5B with 0.5B on HumanEval", ratios, _notes(rows, options, session), (chart,))


async def _measure(options: argparse.Namespace, session: Session) -> None:
    async with AsyncExitStack() as stack:
        contestants = await _contestants(options, session, stack)
        prompts = human_eval(options.data, options.prompts)
        for contestant in contestants:
            await contestant.answer(Question("Say hello.", 8))
        for key in session.todo([f"prompt {i}" for i in range(len(prompts))]):
            number = int(key.split()[1])
            answers = await ask_all(contestants, Question(prompts[number], options.tokens), number)
            session.say(", ".join(f"{name} {row['tokens'] / row['seconds']:.1f}" for name, row in answers.items()))
            session.record(key, {"answers": answers})


async def _contestants(options: argparse.Namespace, session: Session, stack: AsyncExitStack) -> list[Contestant]:
    from bench import stock
    from bench.deployment import Up
    from bench.peers.started import peers

    session.say("loading models")
    up = await stack.enter_async_context(Up(*up_arguments(options)))
    found: list[Contestant] = [
        speculative("outrider", up.client, options.draft_length),
        Ours("own_plain", up.client, "off"),
    ]
    if options.policy:
        found.append(speculative("outrider_policy", up.client, 0))
    for entry in options.also:
        name, _, flags = entry.partition("=")
        also = await stack.enter_async_context(Up(*up_arguments(options, flags)))
        found.append(speculative(f"outrider_{name}", also.client, options.draft_length))
    found += stock.contestants(options.stock, TARGET, DRAFT, options.threads)
    found += await peers(options.peers, TARGET, DRAFT, options.threads, stack, session.say)
    return found


def _ratios(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Ratio]:
    """Of the speculative run against each other contestant, and against the better of each family."""
    found: dict[str, Ratio] = {}
    for other in names:
        if other != "outrider":
            found[other] = ratio(speedups(rows, "outrider", other), GOALS.get(other))
    for family, members in (
        ("transformers_assisted_best", ("transformers_assisted", "transformers_lookup")),
        ("vllm_best", ("vllm_plain", "vllm_draft")),
    ):
        taking_part = [name for name in members if name in names]
        if taking_part:
            best = max(taking_part, key=lambda name: ratio(rates(rows, name)).median)
            found[family] = ratio(speedups(rows, "outrider", best), GOALS[family])
    return found


def _by_speed(rows: list[dict[str, Any]], names: list[str]) -> dict[str, list[float]]:
    by_name = {name: rates(rows, name) for name in names}
    return dict(sorted(by_name.items(), key=lambda entry: -ratio(entry[1]).median))


def _notes(rows: list[dict[str, Any]], options: argparse.Namespace, session: Session) -> str:
    ours = [row["answers"]["outrider"] for row in rows]
    same = sum(row["answers"]["outrider"]["ids"] == row["answers"]["own_plain"]["ids"] for row in rows)
    drafted = sum(answer["drafted"] for answer in ours)
    rate = sum(answer["accepted"] for answer in ours) / drafted if drafted else 0.0
    length = options.draft_length or "chosen by the policy"
    return (
        f"{len(rows)} prompts of {options.tokens} tokens, draft length {length}, {options.threads} threads. "
        f"{same} of {len(rows)} speculative answers have the token ids of plain decoding. Acceptance rate {rate:.3f}. "
        f"`transformers_assisted_best` is the faster of its draft model (5 candidates, constant) and prompt lookup. "
        f"{session.stopped_early}"
    ).rstrip()
