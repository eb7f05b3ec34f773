"""The goodput policy against plain decoding and every fixed draft length, at batch 1 to 64 on SmolLM2.

At each batch size the policy should be as fast as the best fixed length *there*, off included. One deployment; what is
asked for differs by request. The prompts ask for a text to be copied, so that the drafter `ngram` has something to say.
Small batches are asked more often in a round: they take least time, and the shortest measurements differ most.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from bench.load import add_small_arguments, up_arguments
from bench.plots import Lines
from bench.ratios import Goal, Ratio, ratio
from bench.session import Result, Session
from outrider.request import SpeculationMode

PROMPT = (
    "Repeat this list three times, word by word: apple {0}, river {0}, stone {0}, cloud {0}, horse {0}, lantern {0}, "
    "winter {0}, copper {0}."
)
GOAL = Goal(0.97)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=2, help="rounds")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--most-answers", type=int, default=16, help="answers by which a smaller batch is repeated")
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 2, 5, 8], help="fixed draft lengths; 0: plain")
    add_small_arguments(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    asyncio.run(_measure(options, session))
    rows = session.rows
    ratios: dict[str, Ratio] = {}
    series: dict[str, list[tuple[float, float]]] = {}
    for batch in options.batches:
        tries = [one for row in rows for one in row["batches"][str(batch)]]
        speeds = {name: [one[name] for one in tries] for name in _names(options)}
        fixed = {name: values for name, values in speeds.items() if name != "goodput"}
        best = max(fixed, key=lambda name: statistics.median(fixed[name]))
        shares = [ours / other for ours, other in zip(speeds["goodput"], speeds[best], strict=True)]
        ratios[f"batch.goodput_vs_best_fixed.{batch}"] = ratio(shares, GOAL)
        ratios[f"batch.goodput_vs_plain.{batch}"] = ratio(
            [ours / plain for ours, plain in zip(speeds["goodput"], speeds["length 0"], strict=True)]
        )
        for name, values in speeds.items():
            series.setdefault(name, []).append((float(batch), statistics.median(values)))
    chart = Lines("batch", f"Goodput policy, {options.model}", "batch", "tokens per second", series, doubling=True)
    notes = (
        f"{len(rows)} rounds of {options.tokens} tokens per answer, drafter ngram, behind one unmeasured round. The "
        f"best fixed length is that of the highest median at its batch size. {session.stopped_early}"
    )
    return Result("Goodput policy at every batch size", ratios, notes.rstrip(), (chart,))


def _names(options: argparse.Namespace) -> list[str]:
    return ["goodput", *(f"length {length}" for length in options.lengths)]


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.deployment import Up

    async with Up(*up_arguments(options), "--policy", "goodput") as up:
        await _round(up, options, -1, session)
        for key in session.todo([f"round {i}" for i in range(options.prompts)]):
            session.record(key, {"batches": await _round(up, options, int(key.split()[1]), session)})


async def _round(
    up: object, options: argparse.Namespace, number: int, session: Session
) -> dict[str, list[dict[str, float]]]:
    """By batch size: tokens per second by contestant, of each try."""
    found: dict[str, list[dict[str, float]]] = {}
    for batch in options.batches:
        tries = max(options.most_answers // batch, 1)
        for i in range(tries):
            names = _names(options)
            first = (number * tries + i) % len(names)
            speeds = {
                name: await _speed(up, name, batch, number, options.tokens) for name in names[first:] + names[:first]
            }
            found.setdefault(str(batch), []).append({name: round(speed, 3) for name, speed in speeds.items()})
            session.say(f"round {number}, batch {batch}: {found[str(batch)][-1]}")
    return found


async def _speed(up: object, name: str, batch: int, number: int, tokens: int) -> float:
    """Tokens per second of the whole batch."""
    from bench.deployment import Up

    assert isinstance(up, Up)
    length = None if name == "goodput" else int(name.split()[1])
    speculation: SpeculationMode = "auto" if length is None else "on" if length else "off"
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            up.client.complete(
                messages=[{"role": "user", "content": PROMPT.format(100 * (number + 1) + i)}],
                max_tokens=tokens,
                min_tokens=tokens,
                temperature=0.0,
                speculation=speculation,
                draft_length=length or None,
            )
            for i in range(batch)
        )
    )
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)
