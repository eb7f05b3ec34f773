"""Charts as PNG files, light and readable."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#2f6fb0", "#e08a1e", "#4a9a5b", "#b5485d", "#7a62a8", "#6b7280", "#2aa198", "#c2a200")


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per label: the median of its values; the values themselves as points. Labels that begin with the same
    words before a comma have one colour."""

    name: str
    title: str
    unit: str
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Lines:
    """One line per label through its (x, y) points. doubling: x grows by doubling."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    doubling: bool = False


Chart = Bars | Lines


def draw(chart: Chart, path: Path) -> None:
    """Raises ImportError without matplotlib (extra `dev`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.2 + 0.32 * len(chart.values) if isinstance(chart, Bars) else 3.8
    figure = Figure(figsize=(7.2, max(height, 2.2)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    axes.set_title(chart.title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if isinstance(chart, Bars):
        _bars(axes, chart)
    else:
        _lines(axes, chart)
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _bars(axes: Any, chart: Bars) -> None:
    labels = list(chart.values)[::-1]
    kinds = list(dict.fromkeys(label.partition(",")[0] for label in chart.values))
    for i, label in enumerate(labels):
        values = chart.values[label]
        median = statistics.median(values)
        axes.barh(i, median, height=0.62, color=COLOURS[kinds.index(label.partition(",")[0]) % len(COLOURS)])
        axes.plot(values, [i] * len(values), ".", color="#222222", alpha=0.35, markersize=4)
        axes.annotate(f" {median:.3g}", (max([median, *values]), i), va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlabel(chart.unit, fontsize=9)
    axes.grid(axis="x", color="#e5e7eb")
    axes.margins(x=0.1)
    axes.set_xlim(left=0)


def _lines(axes: Any, chart: Lines) -> None:
    for i, (label, points) in enumerate(chart.series.items()):
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, label=label, color=COLOURS[i % len(COLOURS)])
    if chart.doubling:
        ticks = sorted({x for points in chart.series.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(chart.x_label, fontsize=9)
    axes.set_ylabel(chart.y_label, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(color="#e5e7eb")
    axes.legend(frameon=False, fontsize=9)
