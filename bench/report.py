"""Results as files: `docs/benchmarks/NAME.json` with machine, command, raw figures and ratios, and a page of all."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.journal import ROOT
from bench.plots import Chart, draw
from bench.ratios import CONFIDENCE, Ratio
from bench.registry import BENCHES
from bench.session import Result

RESULTS = ROOT / "docs" / "benchmarks"

HEAD = f"""# Measured results

Made by `make bench`; every table names its command. All contestants answer a prompt before any answers the next one,
and ratios are taken prompt by prompt; prefix caches are off. Figures are medians (means where the
section says so) with a bootstrap interval of {CONFIDENCE:.0%}. Compare ratios within one table, not absolute times
between machines: identical runs differ by up to 15 %. A goal within 10 % of 1 that the median misses but the interval
reaches is told as within noise."""


_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "grpcio": version("grpcio"),
    }


def page_of(results: Path) -> Path:
    """Beside the folder of the results, with its name."""
    return results.with_suffix(".md")


def write(
    name: str, result: Result, command: str, raw: Sequence[Any], commits: Sequence[str], results: Path = RESULTS
) -> None:
    """Writes NAME.json and the charts, and makes the page anew."""
    results.mkdir(parents=True, exist_ok=True)
    content = {
        "title": result.title,
        "machine": machine(),
        "command": command,
        "commits": list(commits),
        "notes": result.notes,
        "ratios": {key: asdict(value) for key, value in result.ratios.items()},
        "plots": [_drawn(chart, results) for chart in result.charts],
        "raw": list(raw),
    }
    (results / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    write_page(results)


def write_page(results: Path = RESULTS) -> None:
    page_of(results).write_text(page(results))


def page(results: Path = RESULTS) -> str:
    """The page of all results in a folder, in the order of the benchmarks."""
    order = {name: i for i, name in enumerate(BENCHES)}
    paths = sorted(results.glob("*.json"), key=lambda path: (order.get(path.stem.split("_")[0], len(order)), path.stem))
    sections = [_section(json.loads(path.read_text()), results.name) for path in paths]
    return "\n\n".join([HEAD, *sections]) + "\n"


def _drawn(chart: Chart, results: Path) -> str:
    file = f"{chart.name}.png"
    try:
        draw(chart, results / file)
    except ImportError:
        print(f"{file} is not drawn anew: matplotlib is missing (make setup)", file=sys.stderr)
    return file


def _section(result: dict[str, Any], folder: str) -> str:
    rows = [_row(key, Ratio(**value)) for key, value in result["ratios"].items()]
    table = "\n".join(["| figure | value (interval, n) | goal | |", "|---|---|---|---|", *rows])
    plots = [f"![{result['title']}]({folder}/{file})" for file in result.get("plots", ())]
    parts = (f"## {result['title']}", _origin(result), table, *plots, result["notes"])
    return "\n\n".join(part for part in parts if part)


def _origin(result: dict[str, Any]) -> str:
    machine_line = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    commits = result.get("commits", ())
    return f"`{result['command']}` on {machine_line}" + (f"; code {', '.join(commits)}." if commits else ".")


def _row(key: str, figure: Ratio) -> str:
    return f"| `{key}` | {figure} | {figure.goal or 'reported'} | {figure.verdict} |"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """With those of its instructions that products depend on: the same name may stand for a CPU with and without."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return platform.processor()
    told = {key.strip(): value.strip() for key, _, value in lines}
    has = [name for name in _INSTRUCTIONS if name in told.get("flags", "").split()]
    return " ".join((told.get("model name", "unknown"), *(["with", *has] if has else [])))
