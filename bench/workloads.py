"""The prompts: HumanEval and Spec-Bench, from the folder that --data names."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.journal import ROOT

INSTRUCTION = "Complete this Python function. Answer with code only.\n\n"
DATA = ROOT.parent / "shared" / "data"


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=DATA, help="folder of human_eval.jsonl and spec_bench.jsonl")


def human_eval(data: Path, count: int) -> list[str]:
    """The first `count` problems. Exits with one line if they are not there."""
    return [INSTRUCTION + problem["prompt"] for problem in _lines(data / "human_eval.jsonl", "prompt")[:count]]


def spec_bench(data: Path, per_category: int) -> list[tuple[str, str]]:
    """(category, first turn) of the first `per_category` questions of every category, the categories in turn, so that a
    run that is cut short has seen all of them. Exits with one line if they are not there."""
    by_category: dict[str, list[str]] = {}
    for question in _lines(data / "spec_bench.jsonl", "turns"):
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    return [
        (category, turns[i]) for i in range(per_category) for category, turns in by_category.items() if i < len(turns)
    ]


def _lines(path: Path, field: str) -> list[dict[str, Any]]:
    if not path.is_file():
        sys.exit(f"bench: {path} is missing: put it there (an object with a field `{field}` a line), or give --data")
    return [json.loads(line) for line in path.read_text().splitlines() if line]
