"""1 to 64 concurrent requests: ours plain and speculative against transformers' padded batch, and vLLM if asked for.

For every number of streams all contestants answer, then the next round. Ours are separate processes behind gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from bench.plots import Lines
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session

PROMPT = "Write down some facts about the number {} and explain each of them in a few words."
STREAMS = (1, 4, 16, 64)

Run = Callable[[list[str], int], Awaitable[float]]
"""Tokens per second of all prompts at once."""


def add_small_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of one model with the drafter ngram takes."""
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder")
    parser.add_argument("--up", default="", metavar="FLAGS", help="further flags of `outrider up`")


def up_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    return ("--model", options.model, "--drafter", "ngram", *shlex.split(options.up))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=3, help="rounds, each with every number of streams")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True, help="transformers takes part")
    parser.add_argument("--peers", nargs="*", choices=("vllm_plain",), default=[])
    parser.add_argument("--threads", type=int, default=2, help="of transformers and peers")
    add_small_arguments(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    names = list(rows[0]["streams"][str(options.streams[0])])
    speeds = {name: {n: [row["streams"][str(n)][name] for row in rows] for n in options.streams} for name in names}
    ratios: dict[str, Ratio] = {}
    for name in (name for name in names if name != "plain"):
        goal = Goal(1.0) if name.startswith("vllm") else None
        for n in options.streams:
            shares = [ours / other for ours, other in zip(speeds["plain"][n], speeds[name][n], strict=True)]
            ratios[f"load.plain_vs_{name}.{n}"] = ratio(shares, goal)
    for n in options.streams:
        ratios[f"load.tokens_per_second.plain.{n}"] = ratio(speeds["plain"][n])
    if 1 in options.streams and 16 in options.streams:
        gains = [many / one for one, many in zip(speeds["plain"][1], speeds["plain"][16], strict=True)]
        ratios["concurrency.16_vs_1"] = ratio(gains, Goal(7))
    series = {
        name: [(float(n), statistics.median(values)) for n, values in by_streams.items()]
        for name, by_streams in speeds.items()
    }
    title = f"Concurrent requests, {options.model}"
    chart = Lines("load", title, "streams", "tokens per second", series, doubling=True)
    notes = f"{len(rows)} rounds of {options.tokens} tokens per stream, drafter ngram. {session.stopped_early}".rstrip()
    return Result("1 to 64 concurrent requests", ratios, notes, (chart,))


async def _measure(options: argparse.Namespace, session: Session) -> None:
    async with AsyncExitStack() as stack:
        contestants = await _contestants(options, session, stack)
        for contestant in contestants.values():
            await contestant([PROMPT.format(0)], 8)
        for key in session.todo([f"round {i}" for i in range(options.prompts)]):
            number = int(key.split()[1])
            streams: dict[str, dict[str, float]] = {}
            for n in options.streams:
                prompts = [PROMPT.format(100 * number + i + 3) for i in range(n)]
                streams[str(n)] = {
                    name: round(await ask(prompts, options.tokens), 3) for name, ask in contestants.items()
                }
                session.say(f"{key}, {n} streams: {streams[str(n)]}")
            session.record(key, {"streams": streams})


async def _contestants(options: argparse.Namespace, session: Session, stack: AsyncExitStack) -> dict[str, Run]:
    from bench.contestants import Question
    from bench.deployment import Up
    from bench.peers.process import peers

    up = await stack.enter_async_context(Up(*up_arguments(options)))
    found: dict[str, Run] = {"plain": _ours(up, "off"), "speculative": _ours(up, "auto")}
    if options.stock:
        from bench.stock import Models

        models = Models(options.model, "", options.threads)

        async def stock(prompts: list[str], tokens: int) -> float:
            answers, seconds = models.generate(prompts, tokens, do_sample=False)
            return sum(map(len, answers)) / seconds

        found["transformers"] = stock
    for peer in await peers(options.peers, options.model, "", options.threads, stack, session.say):

        async def batch(prompts: list[str], tokens: int) -> float:
            answers, seconds = await peer.batch([Question(prompt, tokens) for prompt in prompts])  # noqa: B023
            return sum(map(len, answers)) / seconds

        found[peer.name] = batch
    return found


def _ours(up: object, mode: str) -> Run:
    from bench.deployment import Up
    from outrider.request import SpeculationMode

    assert isinstance(up, Up)
    speculation: SpeculationMode = "off" if mode == "off" else "auto"

    async def run(prompts: list[str], tokens: int) -> float:
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(
                up.client.complete(
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=tokens,
                    min_tokens=tokens,
                    temperature=0.0,
                    speculation=speculation,
                )
                for prompt in prompts
            )
        )
        return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)

    return run
