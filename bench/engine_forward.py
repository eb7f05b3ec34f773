"""Time of one engine forward against the stock model with a DynamicCache, interleaved; prints one JSON object.

    python bench/engine_forward.py --model FOLDER [--rows 1] [--context 192] [--sequences 1 16]

The stock model is a second load of the same folder, untouched, in the same process with the same threads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from specdec.engine.loading import load, read_model, resolve_dtype
from specdec.engine.model import Segment
from specdec.engine.runner import ModelRunner
from specdec.log import Log


def timed(run: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def open_sequences(runner: ModelRunner, count: int, context: list[int]) -> list[str]:
    names = [f"sequence-{i}" for i in range(count)]
    for name in names:
        runner.open(name, Log(name.encode()))
        if not runner.reserve(name, len(context)):
            sys.exit("the KV memory does not hold this context: lower --context or --sequences")
        runner.forward([Segment(name, tuple(context))])
        runner.keep(name, range(len(context)))
    return names


def engine_step(runner: ModelRunner, names: list[str], rows: tuple[int, ...]) -> Callable[[], object]:
    segments = [Segment(name, rows, None, len(rows)) for name in names]

    def step() -> None:
        for name in names:
            runner.reserve(name, len(rows))
        runner.forward(segments)

    return step


def stock_step(model: Any, context: list[int], rows: tuple[int, ...]) -> Callable[[], object]:
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([rows])

    @torch.inference_mode()
    def step() -> None:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.crop(-len(rows))

    with torch.inference_mode():
        model(input_ids=torch.tensor([context]), past_key_values=cache, use_cache=True)
    return step


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runner = load(arguments.model, dtype=arguments.dtype, threads=arguments.threads)
    stock = read_model(arguments.model, resolve_dtype(arguments.dtype, "cpu")).eval()
    draw = random.Random(0)
    context = [draw.randrange(runner.vocabulary_size) for _ in range(arguments.context)]
    rows = tuple(draw.randrange(runner.vocabulary_size) for _ in range(arguments.rows))
    names = open_sequences(runner, max(arguments.sequences), context)
    steps = {f"engine_{count}": engine_step(runner, names[:count], rows) for count in arguments.sequences}
    steps["stock_1"] = stock_step(stock, context, rows)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(arguments.repeats + 2):
        for name, step in steps.items():
            elapsed = timed(step)
            if repeat >= 2:
                times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    first, last = f"engine_{min(arguments.sequences)}", f"engine_{max(arguments.sequences)}"
    growth = max(arguments.sequences) / min(arguments.sequences)
    return {
        "model": runner.name,
        "dtype": runner.dtype,
        "threads": torch.get_num_threads(),
        "context": arguments.context,
        "rows": arguments.rows,
        "repeats": arguments.repeats,
        "times_ms": {name: [round(value, 2) for value in values] for name, values in times.items()},
        "median_ms": {name: round(value, 2) for name, value in medians.items()},
        "engine_over_stock": round(medians["engine_1"] / medians["stock_1"], 3) if "engine_1" in medians else None,
        "throughput_gain": round(growth * medians[first] / medians[last], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192, help="tokens whose KV is there already")
    parser.add_argument("--rows", type=int, default=1, help="rows per sequence and forward")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16], help="sequences in one forward")
    parser.add_argument("--repeats", type=int, default=30)
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
