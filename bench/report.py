"""Results as files: `docs/benchmarks/NAME.json` with machine, command, raw figures and ratios, and a page of all."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median with a bootstrap interval of 95 %, and the figure it should reach ("" : it is only reported)."""

    median: float
    low: float
    high: float
    count: int
    goal: str = ""

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f}, n = {self.count})"


def ratio(values: Sequence[float], goal: str = "", resamples: int = 2000) -> Ratio:
    """Median of `values` with its interval; the resampling is seeded."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Ratio(statistics.median(values), low, high, len(values), goal)


def mean(values: Sequence[float], resamples: int = 2000) -> Ratio:
    """Mean of `values` with its interval, where the values are themselves coarse."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples)]
    return Ratio(statistics.fmean(values), low, high, len(values))


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "grpcio": version("grpcio"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write(name: str, title: str, command: str, raw: Any, ratios: dict[str, Ratio], notes: str = "") -> None:
    """Writes NAME.json and makes the page anew."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "title": title,
        "machine": machine(),
        "command": command,
        "notes": notes,
        "ratios": {key: asdict(value) for key, value in ratios.items()},
        "raw": raw,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    write_page()


def write_page() -> None:
    """`docs/benchmarks.md` from all results."""
    parts = [
        "# Measured results",
        "Made by `make bench`; every table names its command. Figures are medians of interleaved runs (means where\n"
        "the section says so) with a bootstrap interval of 95 %. Compare ratios within one table, not absolute times\n"
        "between machines.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        parts.append(_section(json.loads(path.read_text())))
    PAGE.write_text("\n\n".join(parts) + "\n")


def _section(result: dict[str, Any]) -> str:
    machine_line = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    rows = [
        f"| `{key}` | {Ratio(**value)} | {value['goal'] or 'reported'} |" for key, value in result["ratios"].items()
    ]
    table = "\n".join(["| figure | value (interval, n) | goal |", "|---|---|---|", *rows])
    parts = [f"## {result['title']}", f"`{result['command']}` on {machine_line}.", table]
    if result["notes"]:
        parts.append(result["notes"])
    return "\n\n".join(parts)
