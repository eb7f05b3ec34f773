"""1 to 64 concurrent requests: ours plain and speculative against transformers' padded batch, and vLLM if asked for.

For every number of streams all contestants answer, beginning with another one in each round. Each of ours is a
deployment of its own, separate processes behind gRPC that stream to this process; it keeps its prefix cache, as vLLM
does, and no question is asked twice. `vllm_server` is vLLM's own OpenAI server, which streams to this
process over HTTP; `vllm_plain` and transformers are libraries, each in one process, which stream to nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from bench.contestants import Batching, ContestantFailed, Ours, Question
from bench.plots import Lines
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session
from outrider.request import SpeculationMode

PROMPT = "Write down some facts about the number {} and explain each of them in a few words."
STREAMS = (1, 4, 16, 64)

LABELS = {
    "plain": "ours, plain: a service",
    "speculative": "ours, speculative: a service",
    "vllm_server": "vLLM: a service",
    "vllm_plain": "vLLM: a library",
    "transformers": "transformers: a library",
}

Speeds = Mapping[str, Mapping[int, Sequence[float]]]
"""Tokens per second of all streams together, by contestant and number of streams, one for each round."""


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
    parser.add_argument(
        "--speculative", action=argparse.BooleanOptionalAction, default=True, help="ours takes part speculating too"
    )
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True, help="transformers takes part")
    parser.add_argument("--peers", nargs="*", choices=("vllm_server", "vllm_plain"), default=[])
    parser.add_argument("--threads", type=int, default=2, help="of transformers and peers")
    add_small_arguments(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    speeds = {
        name: {
            n: [row["speeds"][name] for row in rows if row["streams"] == n and name in row["speeds"]]
            for n in options.streams
        }
        for name in dict.fromkeys(name for row in rows for name in row["speeds"])
    }
    series = {
        LABELS[name]: [(float(n), statistics.median(values)) for n, values in by_streams.items() if values]
        for name, by_streams in speeds.items()
    }
    title = f"Concurrent requests, {options.model}"
    chart = Lines("load", title, "streams", "tokens per second", series, doubling=True)
    notes = (
        f"{options.model}, {options.tokens} tokens per stream, {options.prompts} rounds, drafter ngram. Ours and vLLM "
        "keep their prefix caches; questions share what the model's template begins with. Ours and "
        f"`vllm_server` are services that stream to the benchmark's process; `vllm_plain` and `transformers` are "
        f"libraries that stream to nobody. {session.stopped_early}"
    ).rstrip()
    return Result("1 to 64 concurrent requests", _ratios(speeds, options.streams), notes, (chart,))


def _ratios(speeds: Speeds, streams: Sequence[int]) -> dict[str, Ratio]:
    """Of what was measured. A run that --minutes ended early lacks the last rounds of some numbers of streams."""
    found: dict[str, Ratio] = {}
    for name in (name for name in speeds if name != "plain"):
        goal = Goal(1.0) if name.startswith("vllm") else None
        for n in streams:
            shares = [ours / other for ours, other in zip(speeds["plain"][n], speeds[name][n], strict=True)]
            if shares:
                found[f"load.plain_vs_{name}.{n}"] = ratio(shares, goal)
    for n in streams:
        for name in speeds:
            if speeds[name][n]:
                found[f"load.tokens_per_second.{name}.{n}"] = ratio(speeds[name][n])
    if 1 in streams and 16 in streams:
        gains = [many / one for one, many in zip(speeds["plain"][1], speeds["plain"][16], strict=False)]
        if gains:
            found["concurrency.16_vs_1"] = ratio(gains, Goal(7))
    return found


async def _measure(options: argparse.Namespace, session: Session) -> None:
    async with AsyncExitStack() as stack:
        contestants = await _contestants(options, session, stack)
        for contestant in contestants:
            await contestant.batch([Question(PROMPT.format(0), 8)])
        keys = [f"round {i}, {n} streams" for i in range(options.prompts) for n in options.streams]
        for key in session.todo(keys):
            number, n = divmod(keys.index(key), len(options.streams))
            streams = options.streams[n]
            asked = (1 + keys.index(key)) * max(options.streams)
            questions = [Question(PROMPT.format(asked + i), options.tokens) for i in range(streams)]
            first = number % len(contestants)
            speeds = {
                contestant.name: round(await _speed(contestant, questions), 3)
                for contestant in contestants[first:] + contestants[:first]
            }
            session.say(f"{key}: {speeds}")
            session.record(key, {"streams": streams, "speeds": speeds})


async def _speed(contestant: Batching, questions: Sequence[Question]) -> float:
    """Tokens per second of all together. Raises ContestantFailed unless there are as many as asked for."""
    answers, seconds = await contestant.batch(questions)
    received, wanted = sum(map(len, answers)), sum(question.tokens for question in questions)
    if received != wanted:
        raise ContestantFailed(f"{contestant.name} answered with {received} tokens, was asked for {wanted}")
    return received / seconds


async def _contestants(options: argparse.Namespace, session: Session, stack: AsyncExitStack) -> list[Batching]:
    from bench import stock
    from bench.deployment import Up
    from bench.peers.started import peers

    session.say("loading models")
    modes: dict[str, SpeculationMode] = {"plain": "off", "speculative": "auto"}
    found: list[Batching] = []
    for name, mode in modes.items():
        if name == "plain" or options.speculative:
            up = await stack.enter_async_context(Up(*up_arguments(options), prefix_cache=True))
            found.append(Ours(name, up.client, mode))
    if options.stock:
        found.append(stock.Stock("transformers", "plain", stock.Models(options.model, "", options.threads)))
    found += await peers(options.peers, options.model, "", options.threads, stack, session.say)
    return found
