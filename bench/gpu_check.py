"""Checks and times the engine on a device, in one call of under 8 minutes, on random weights: no download.

    python -m bench.gpu_check                       # an 8B-like target and a 1B-like draft on the GPU
    python -m bench.gpu_check --tiny --device cpu   # the same script on a CPU, in under a minute

Checked: the noise's bits, logits over gathered keys and over block tables with and without CUDA graphs against
transformers, draws on the device against the CPU's, whole answers with speculation against plain ones. Timed: one
forward by sequences and rows, decoding plainly and with an oracle's candidates drafted at a real drafter's cost,
transformers' generate and assisted generation. Random models agree on nothing, so assisted generation is also shown as
what its rounds would give at the oracle's acceptance. Prints a table, writes JSON, exits 1 if a check fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bench.gpu_checks import (
    VERIFY,
    check_answers,
    check_draws,
    check_logits,
    check_noise,
    check_reference,
    check_repeats,
)
from bench.gpu_models import DRAFT_1B, TARGET_8B, TINY_DRAFT, TINY_TARGET, Shape, build_model
from bench.gpu_report import Findings
from bench.gpu_rounds import GREEDY, Oracle, decode, generate, synchronize
from bench.report import machine
from specdec.drafters.model import ModelDrafter
from specdec.engine.loading import build_runner, check_device, resolve_dtype
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.log import Log

MINUTES = 7.0
CANDIDATES = VERIFY - 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run. batches: sequences decoded together. grid: (sequences, rows) of the timed forwards."""

    target: Shape
    draft: Shape
    checked: int
    prompt: int
    tokens: int
    batches: tuple[int, ...]
    grid: tuple[tuple[int, int], ...]
    repeats: int
    kv_memory: int


FULL = Sizes(
    TARGET_8B, DRAFT_1B, 80, 256, 128, (1, 8, 32), ((1, 1), (1, 6), (8, 1), (8, 6), (32, 1), (32, 6)), 30, 4 * 2**30
)
TINY = Sizes(TINY_TARGET, TINY_DRAFT, 50, 24, 20, (1, 4), ((1, 1), (4, 6)), 3, 2**26)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        check_device(options.device)
        dtype = resolve_dtype(options.dtype, options.device)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    sizes = TINY if options.tiny else FULL
    findings = Findings(time.monotonic() + options.minutes * 60)
    started = time.monotonic()
    try:
        run(findings, sizes, options.device, dtype, options.acceptance)
    finally:  # what was found before a fault is worth keeping
        findings.figure("seconds", time.monotonic() - started)
        about: dict[str, object] = {
            "machine": {**machine(), "device": device_name(options.device), "torch": torch.__version__},
            "command": f"python -m bench.gpu_check {' '.join(arguments or sys.argv[1:])}".strip(),
            "options": {**vars(options), "json": str(options.json), "dtype": str(dtype)},
        }
        findings.write(options.json, about)
    print(findings.table())
    print(f"\n{options.json}")
    return 0 if findings.passed else 1


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    options.add_argument("--tiny", action="store_true", help="small models and few tokens, to try the script itself")
    options.add_argument("--dtype", default="auto", help="auto, bf16 or fp32")
    options.add_argument("--acceptance", type=_share, default=0.8, help="of the oracle, per token, in [0, 1]")
    options.add_argument("--minutes", type=float, default=MINUTES, help="no timing begins later; checks always run")
    options.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the results are written")
    return options


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be in [0, 1]")
    return value


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def run(findings: Findings, sizes: Sizes, device: str, dtype: torch.dtype, acceptance: float) -> None:
    quiet: Any = transformers_logging  # it has no types
    quiet.set_verbosity_error()
    model = build_model(sizes.target, device, dtype, seed=0)
    draft = build_model(sizes.draft, device, dtype, seed=1)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(sizes.target.vocabulary) for _ in range(sizes.prompt)] for _ in range(max(sizes.batches))
    ]
    runners = engines(model, sizes)
    print(f"       engines: {', '.join(runners)}", file=sys.stderr)
    check_noise(findings, device, sizes.target.vocabulary)
    reference = check_reference(findings, model, (prompts[0] + prompts[1])[: sizes.checked])
    for name, runner in runners.items():
        check_logits(findings, runner, name, reference)
    best = list(runners.values())[-1]
    check_draws(findings, reference.stock[:VERIFY])
    check_repeats(findings, best, prompts[:2], sizes.tokens)
    for name, runner in runners.items():
        check_answers(findings, runner, name, prompts[:4], sizes.tokens, reference.near_tie)
    for name, runner in runners.items():
        time_forwards(findings, runner, name, sizes)
    drafter = ModelDrafter(build_runner(draft, name="draft", kv_memory=sizes.kv_memory // 4, exact=False))
    for batch in sizes.batches:
        time_decoding(findings, best, model, draft, drafter, prompts[:batch], sizes.tokens, acceptance)


def engines(model: Any, sizes: Sizes) -> dict[str, ModelRunner]:
    """The ways to attend that work here, the fastest last. They share the weights."""

    def built(implementation: str, graphs: bool) -> ModelRunner:
        return build_runner(
            model, name="target", kv_memory=sizes.kv_memory, implementation=implementation, graphs=graphs
        )

    found = {"gather": built("sdpa", False)}
    if model.device.type == "cpu":  # the same block tables, by plain torch
        return {"block tables": built("varlen_reference", False)} | found
    try:
        found |= {"varlen": built("varlen", False), "varlen+graphs": built("varlen", True)}
    except ValueError as error:
        print(f"       {error}", file=sys.stderr)
    return found


def time_forwards(findings: Findings, runner: ModelRunner, name: str, sizes: Sizes) -> None:
    """Milliseconds of one forward of (sequences x rows) behind a prompt each, its logits left on the device."""
    for sequences, rows in sizes.grid:
        figure = f"forward_ms.{name}.{sequences}x{rows}"
        if not findings.has_time_for(figure):
            continue
        names = [str(i) for i in range(sequences)]
        for one in names:
            runner.open(one, Log(one.encode()))
            runner.reserve(one, sizes.prompt)
            runner.forward([Segment(one, tuple(range(sizes.prompt)))])
            runner.keep(one, range(sizes.prompt))
        segments = [Segment(one, tuple(range(rows)), None, rows) for one in names]
        times: list[float] = []
        for _ in range(sizes.repeats + 3):
            for one in names:
                runner.reserve(one, rows)
            synchronize(runner.device)
            started = time.perf_counter()
            runner.forward(segments)
            synchronize(runner.device)
            times.append((time.perf_counter() - started) * 1e3)
        for one in names:
            runner.release(one)
        findings.figure(figure, statistics.median(times[3:]))


def time_decoding(
    findings: Findings,
    target: ModelRunner,
    model: Any,
    draft: Any,
    drafter: ModelDrafter,
    prompts: list[list[int]],
    tokens: int,
    acceptance: float,
) -> None:
    """Tokens per second of a batch: ours and transformers', plain and speculative; each is run once to warm up."""
    batch = len(prompts)
    if not findings.has_time_for(f"decoding.{batch}"):
        return
    plain = [decode(target, prompts, tokens, GREEDY) for _ in range(2)][-1]
    oracle = Oracle(plain.answers, acceptance, CANDIDATES, drafter)
    ours = [decode(target, prompts, tokens, GREEDY, oracle) for _ in range(2)][-1]
    findings.figure(f"tokens_per_second.plain.{batch}", plain.tokens_per_second)
    findings.figure(f"tokens_per_second.speculative.{batch}", ours.tokens_per_second)
    findings.figure(f"round_ms.plain.{batch}", plain.round_ms)
    findings.figure(f"round_ms.speculative.{batch}", ours.round_ms)
    findings.figure(f"accepted_share.{batch}", ours.accepted / max(ours.drafted, 1))
    if not findings.has_time_for(f"transformers.{batch}"):
        return
    generate(model, prompts, 4)
    stock = generate(model, prompts, tokens)
    findings.figure(f"tokens_per_second.transformers.{batch}", stock.tokens_per_second)
    findings.figure(f"ratio.plain_vs_transformers.{batch}", plain.tokens_per_second / stock.tokens_per_second)
    findings.figure(f"ratio.speculative_vs_plain.{batch}", ours.tokens_per_second / plain.tokens_per_second)
    if batch > 1 or not findings.has_time_for("assisted"):  # transformers assists one prompt
        return
    generate(model, prompts, 4, draft, CANDIDATES)
    assisted = generate(model, prompts, tokens, draft, CANDIDATES)
    expected = sum(acceptance**i for i in range(CANDIDATES + 1))
    findings.figure("tokens_per_second.assisted", assisted.tokens_per_second)
    findings.figure("round_ms.assisted", assisted.round_ms)
    findings.figure("tokens_per_second.assisted_at_the_acceptance", expected / assisted.round_ms * 1e3)
    findings.figure(
        "ratio.speculative_vs_assisted_at_the_acceptance",
        ours.tokens_per_second / (expected / assisted.round_ms * 1e3),
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ngpu_check: interrupted", file=sys.stderr)
        sys.exit(130)
