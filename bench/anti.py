"""A drafter that is always wrong: what the goodput policy loses against plain decoding, at batch 1 and 16.

20 consecutive requests of 128 tokens, each answered plainly too, in turn. The first one starts cold: a new deployment
that knows nothing of its workers. With `--model table` (a forward takes 10 ms and 0.3 ms for each row, a candidate
2 ms) it is table models in this process, with a model's name it is `outrider up` with that model and the same drafter.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from bench.journal import ROOT
from bench.plots import Lines
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session

sys.path.insert(0, str(ROOT / "tests"))

GOAL = Goal(0.97)
FIRST_GOAL = Goal(0.90)

Ask = Callable[[int, int, int, bool], Awaitable[float]]
"""Seconds of a batch: its size, number of the request, tokens, whether speculation may be used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=20, help="consecutive requests")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="requests at once")
    parser.add_argument("--starts", type=int, default=1, help="cold starts, each with all requests")
    parser.add_argument("--model", default="table", help="table, or a model for `outrider up`")
    parser.add_argument("--policy", choices=("goodput", "threshold"), default="goodput")
    parser.add_argument("--draft-ms", type=float, default=2.0, help="what a candidate costs")


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    ratios: dict[str, Ratio] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    all_shares: list[float] = []
    for batch in options.batches:
        rows = [row for row in session.rows if row["batch"] == batch]
        if not rows:
            continue
        shares = [share for row in rows for share in _shares(row)]
        all_shares += shares
        ratios[f"anti.vs_plain.{batch}"] = ratio(shares, GOAL)
        ratios[f"anti.first_vs_plain.{batch}"] = ratio([_shares(row)[0] for row in rows], FIRST_GOAL)
        lines[f"batch {batch}"] = [(i + 1.0, share) for i, share in enumerate(_shares(rows[0]))]
    ratios = {"anti.vs_plain": ratio(all_shares, GOAL), **ratios}
    chart = Lines("anti", "A drafter that is always wrong, against plain", "request", "throughput / plain", lines)
    where = "table models" if options.model == "table" else options.model
    notes = (
        f"{options.prompts} consecutive requests of {options.tokens} tokens behind each of {options.starts} "
        f"cold starts, {where}, policy {options.policy}, {options.draft_ms:g} ms per candidate. `vs_plain` without a "
        f"number is over all batches, `first` over the cold starts. {session.stopped_early}"
    )
    return Result("A drafter that is always wrong", ratios, notes.rstrip(), (chart,))


async def _measure(options: argparse.Namespace, session: Session) -> None:
    deployment = _table if options.model == "table" else _real
    keys = [f"start {start}, batch {batch}" for start in range(options.starts) for batch in options.batches]
    for key in session.todo(keys):
        batch = int(key.rpartition(" ")[2])
        pairs: list[tuple[float, float]] = []
        async with deployment(options) as ask:
            for number in range(options.prompts):
                # The cold start is that of the speculative run; then they take turns in being first.
                speculative = await ask(batch, number, options.tokens, True) if number % 2 == 0 else 0.0
                plain = await ask(batch, number, options.tokens, False)
                speculative = speculative or await ask(batch, number, options.tokens, True)
                pairs.append((round(plain, 4), round(speculative, 4)))
                if number % 5 == 4:
                    session.say(f"{key}: request {number + 1} of {options.prompts}")
        session.record(key, {"batch": batch, "plain_and_speculative_seconds": pairs})


def _shares(row: dict[str, Any]) -> list[float]:
    return [plain / speculative for plain, speculative in row["plain_and_speculative_seconds"]]


@asynccontextmanager
async def _table(options: argparse.Namespace) -> AsyncIterator[Ask]:
    from bench.anti_drafter import AntiDrafter
    from bench.timed_models import LAW, TimedModel
    from scheduler.config import Policy
    from scheduler.request import GenerationRequest, Speculation
    from specdec.params import SamplingParams
    from tools.deployment import Deployment, quick_config

    drafter = AntiDrafter(LAW.vocabulary_size, options.draft_ms / 1e3)
    config = replace(quick_config(5, Policy(options.policy)), draft_timeout=2.0)
    async with Deployment([TimedModel(0.010, per_row=0.0003)], [drafter], config) as deployment:

        async def ask(batch: int, number: int, tokens: int, speculating: bool) -> float:
            speculation = Speculation.AUTO if speculating else Speculation.OFF
            requests = [
                GenerationRequest(
                    (1, 2 + number, 3 + i), SamplingParams(temperature=0.0), max_tokens=tokens, speculation=speculation
                )
                for i in range(batch)
            ]
            started = time.perf_counter()
            await asyncio.gather(*(deployment.generate(request) for request in requests))
            return time.perf_counter() - started

        yield ask


@asynccontextmanager
async def _real(options: argparse.Namespace) -> AsyncIterator[Ask]:
    from bench.deployment import Up
    from bench.load import PROMPT
    from outrider.request import SpeculationMode

    command = f"{sys.executable} -m bench.anti_drafter --config {{config}} --draft-ms {options.draft_ms}"
    arguments = ("--model", options.model, "--policy", options.policy, "--draft-command", command)
    async with Up(*arguments) as up:

        async def ask(batch: int, number: int, tokens: int, speculating: bool) -> float:
            mode: SpeculationMode = "auto" if speculating else "off"
            started = time.perf_counter()
            await asyncio.gather(
                *(
                    up.client.complete(
                        PROMPT.format(100 * number + i),
                        max_tokens=tokens,
                        temperature=0.0,
                        ignore_eos=True,
                        speculation=mode,
                    )
                    for i in range(batch)
                )
            )
            return time.perf_counter() - started

        yield ask
