"""How near the Qwen pair comes to what its engine allows.

The bound is E / (T_verify + draft length x T_draft): E committed tokens per verify, seen in the answer itself, over the
times of the bare engine, in this process without any service, at the same context, on the same cores, right before and
after each answer. It is a rate of rounds, so it is compared with the rounds behind the first: before, the drafter reads
the prompt. `closeness_from_first_token` counts that time too, though the bound does not. Also: what processing, noise
and the accept rule take of a verify, at temperature 0.8 and top-p 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.contestants import Question
from bench.pair import DRAFT, TARGET, add_pair_arguments, speculative, up_arguments
from bench.plots import Bars
from bench.ratios import Goal, ratio
from bench.session import Result, Session
from bench.workloads import add_data_argument, human_eval

CLOSENESS = Goal(0.92)
DECIDE_GOAL = Goal(0.08, at_most=True, unit="of a verify")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=6, help="HumanEval prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--repeats", type=int, default=5, help="bare forwards of each kind around each answer")
    parser.add_argument("--target-load", default="", metavar="KEY=VALUE,...", help="how the bare target is loaded")
    add_pair_arguments(parser)
    add_data_argument(parser)


def run(options: argparse.Namespace, session: Session) -> Result:
    least = 4 * (1 + options.draft_length)
    if options.tokens < least:
        raise SystemExit(f"bench: --tokens is {options.tokens}, must be at least {least}, to have rounds to time")
    if not options.draft_length:
        raise SystemExit("bench: bound needs a fixed --draft-length of at least 1")
    asyncio.run(_measure(options, session))
    rows = session.rows
    closeness = [row["round_bound_ms"] / row["round_ms"] for row in rows]
    from_first_token = [row["measured_rate"] / row["bound_rate"] for row in rows]
    decide = [row["decide_ms"] / row["verify_ms"] for row in rows]
    ratios = {
        "bound.closeness": ratio(closeness, CLOSENESS),
        "bound.closeness_from_first_token": ratio(from_first_token),
        "bound.decide_share": ratio(decide, DECIDE_GOAL),
        "bound.verify_ms": ratio([row["verify_ms"] for row in rows]),
        "bound.draft_ms": ratio([row["draft_ms"] for row in rows]),
    }
    chart = Bars(
        "bound",
        "The Qwen pair against the bare engine",
        "tokens per second",
        {"bound": [row["bound_rate"] for row in rows], "measured": [row["measured_rate"] for row in rows]},
    )
    lengths = statistics.fmean(row["mean_acceptance_length"] for row in rows)
    notes = (
        f"{len(rows)} HumanEval prompts of {options.tokens} tokens, greedy, draft length {options.draft_length}, "
        f"{options.threads} threads; {lengths:.2f} committed tokens per verify. `decide_share`: law, noise and accept "
        f"of a block at temperature 0.8 and top-p 0.9 against the forward of that block. {session.stopped_early}"
    )
    return Result("The Qwen pair against the bare engine", ratios, notes.rstrip(), (chart,))


async def _measure(options: argparse.Namespace, session: Session) -> None:
    from bench.deployment import Up

    session.say("loading models")
    async with Up(*up_arguments(options)) as up:
        engine = _Engine(options)
        ours = speculative("outrider", up.client, options.draft_length)
        await ours.answer(Question("Say hello.", 8))
        prompts = human_eval(options.data, options.prompts)
        for key in session.todo([f"prompt {i}" for i in range(len(prompts))]):
            question = Question(prompts[int(key.split()[1])], options.tokens)
            # Half way through the answer; a token of code has about three characters.
            context = len(question.prompt) // 3 + options.tokens // 2
            before = engine.times(context, options.repeats)
            answer = (await ours.answer(question)).row()
            after = engine.times(context, options.repeats)
            times = {name: statistics.median(before[name] + after[name]) for name in before}
            per_verify = answer["mean_acceptance_length"]
            round_ms = times["verify_ms"] + options.draft_length * times["draft_ms"]
            session.record(
                key,
                {
                    "measured_rate": answer["decode_rate"],
                    "bound_rate": round(per_verify / round_ms * 1e3, 3),
                    "round_ms": round(answer["round_seconds"] * 1e3, 3),
                    "round_bound_ms": round(round_ms, 3),
                    "mean_acceptance_length": per_verify,
                    **{name: round(value, 3) for name, value in times.items()},
                    "answer": answer,
                },
            )


class _Engine:
    """Both models in this process, as the workers load them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from services.models import resolve
        from specdec.engine.loading import load

        common: dict[str, Any] = {"threads": options.threads, "max_context": 2048}
        self._target = load(resolve(TARGET), **common, **_pairs(options.target_load))
        self._draft = load(resolve(DRAFT), **common, drafts=True, quantization=options.draft_quantization)
        self._rows = 1 + options.draft_length

    def times(self, context: int, repeats: int) -> dict[str, list[float]]:
        """Milliseconds behind `context` tokens: of a verify, of one draft token, and of deciding about a block."""
        from bench.engine_forward import engine_step, open_sequences

        found: dict[str, list[float]] = {"verify_ms": [], "draft_ms": [], "decide_ms": []}
        tokens = [100 + i for i in range(context)]
        steps: dict[str, Callable[[], object]] = {}
        for name, model, rows in (("verify_ms", self._target, self._rows), ("draft_ms", self._draft, 1)):
            sequences = open_sequences(model, 1, tokens)
            steps[name] = engine_step(model, sequences, tuple(tokens[:rows]))
        steps["decide_ms"] = self._decide(tokens)
        for _ in range(repeats + 1):
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                found[name].append((time.perf_counter() - started) * 1e3)
        for model in (self._target, self._draft):
            model.release("sequence-0")
        return {name: values[1:] for name, values in found.items()}

    def _decide(self, tokens: list[int]) -> Callable[[], object]:
        import torch

        from specdec.candidates import CandidateTree
        from specdec.law import Law
        from specdec.params import Report, SamplingParams, StopConditions
        from target_worker.decide import decide

        generator = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(self._rows, self._target.vocabulary_size, generator=generator)
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=7)
        law = Law(sampling, StopConditions(len(tokens), len(tokens) + 1000), tokens)
        candidates = CandidateTree.chain(law.draw(logits, [tuple(tokens[:i]) for i in range(self._rows)])[:-1])
        return lambda: decide(law, candidates, logits, len(tokens), 1 << 20, Report())


def _pairs(text: str) -> dict[str, Any]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)
