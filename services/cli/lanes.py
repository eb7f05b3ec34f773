"""A sequence's journal as a text lane chart: draft, wire, verify and tokens over time, in strips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rich.text import Text

from outrider.v1 import control_service_pb2 as pb
from outrider.v1.types_pb2 import TokenSource

LABEL = 8
COLUMNS_PER_ROUND = 8
MAX_STRIPS = 400
NICE = (1, 2, 5)

DRAFT, AHEAD, STALE, WIRE, VERIFY, PLAIN, NOTE = "▒", "▓", "×", "┄", "█", "░", "!"
STYLES = {DRAFT: "green", AHEAD: "bright_green", STALE: "red", WIRE: "bright_black", VERIFY: "blue", PLAIN: "cyan"}
TOKENS = {
    TokenSource.TOKEN_SOURCE_ACCEPTED: ("●", "green"),
    TokenSource.TOKEN_SOURCE_CORRECTION: ("◆", "yellow"),
    TokenSource.TOKEN_SOURCE_BONUS: ("+", "yellow"),
    TokenSource.TOKEN_SOURCE_PLAIN: ("·", "cyan"),
}
LEGEND = (
    (DRAFT, "green"),
    " draft  ",
    (AHEAD, "bright_green"),
    " ahead  ",
    (STALE, "red"),
    " stale  ",
    (WIRE, "bright_black"),
    " wire  ",
    (VERIFY, "blue"),
    " verify  ",
    (PLAIN, "cyan"),
    " plain   ",
    ("●", "green"),
    " accepted  ",
    ("◆", "yellow"),
    " correction  ",
    ("+", "yellow"),
    " bonus  ",
    ("·", "cyan"),
    " plain",
)


@dataclass(slots=True)
class Lane:
    """One row of the chart, as long as the request: a mark and a style per column."""

    name: str
    marks: dict[int, tuple[str, str]] = field(default_factory=dict)

    def fill(self, begin: float, end: float, mark: str) -> None:
        """begin, end: columns; at least one is filled, unless on the way passed less than half a one."""
        if mark == WIRE and end - begin < 0.5:
            return
        first = math.floor(begin + 1e-6)
        for column in range(first, max(math.ceil(end - 1e-6), first + 1)):
            self.marks[column] = mark, STYLES.get(mark, "red")

    def put(self, column: int, marks: list[tuple[str, str]]) -> None:
        """Side by side, from the first free column on."""
        column = max(column, max(self.marks, default=-1) + 1)
        for offset, mark in enumerate(marks):
            self.marks[column + offset] = mark

    def strip(self, first: int, width: int) -> Text:
        line = Text(self.name.ljust(LABEL))
        for column in range(first, first + width):
            mark, style = self.marks.get(column, (" ", ""))
            line.append(mark, style)
        line.rstrip()
        return line


def lanes_of(sequence: pb.SequenceRounds, width: int, scale: float | None = None) -> Iterator[Text]:
    """Lines of at most `width` columns. scale: seconds of a column; None: a round is some columns wide."""
    columns = width - LABEL
    scale = scale or _scale(sequence)
    lanes = draw(sequence, scale)
    last = max((max(lane.marks, default=-1) for lane in lanes), default=-1)
    strips = min(math.ceil((last + 1) / columns), MAX_STRIPS)
    for strip in range(strips):
        first = strip * columns
        if not any(first <= column < first + columns for lane in lanes for column in lane.marks):
            continue
        yield Text(_axis(first, columns, scale), "dim")
        yield from (lane.strip(first, columns) for lane in lanes)
        yield Text("")


def draw(sequence: pb.SequenceRounds, scale: float) -> tuple[Lane, ...]:
    """Lanes `draft`, `wire`, `verify`, `tokens`, `notes`, by columns of `scale` seconds."""
    draft, wire, verify, tokens, notes = (Lane(name) for name in ("draft", "wire", "verify", "tokens", ""))
    for entry in sequence.entries:
        match entry.WhichOneof("entry"):
            case "step":
                step = entry.step
                if step.HasField("draft"):
                    _draw_draft(draft, wire, step.draft, scale, AHEAD if step.draft.ahead else DRAFT)
                    wire.fill(step.draft.arrived_at / scale, step.began_at / scale, WIRE)
                begin = max(entry.at - step.step_time, step.began_at)
                verify.fill(begin / scale, entry.at / scale, VERIFY if step.num_draft_tokens else PLAIN)
                tokens.put(math.ceil(entry.at / scale - 1e-6) - 1, [TOKENS.get(s, ("?", "")) for s in step.sources])
            case "stale" if entry.stale.HasField("draft"):
                _draw_draft(draft, wire, entry.stale.draft, scale, STALE)
            case "placed" if entry.placed.cause:
                notes.put(math.floor(entry.at / scale), _note(f"moved: {entry.placed.cause}"))
            case "fell_back":
                notes.put(math.floor(entry.at / scale), _note(entry.fell_back.reason))
    return (draft, wire, verify, tokens) + ((notes,) if notes.marks else ())


def _draw_draft(draft: Lane, wire: Lane, times: pb.DraftTimes, scale: float, mark: str) -> None:
    """What was neither asking nor drafting was the way: there and back in equal parts."""
    asked_at = times.asked_at if times.HasField("asked_at") else times.arrived_at - times.draft_time
    way = max(times.arrived_at - asked_at - times.draft_time, 0.0) / 2
    wire.fill(asked_at / scale, (asked_at + way) / scale, WIRE)
    wire.fill((times.arrived_at - way) / scale, times.arrived_at / scale, WIRE)
    draft.fill((times.arrived_at - way - times.draft_time) / scale, (times.arrived_at - way) / scale, mark)


def _note(text: str) -> list[tuple[str, str]]:
    return [(letter, "red") for letter in f"{NOTE}{text} "]


def _scale(sequence: pb.SequenceRounds) -> float:
    """1, 2 or 5 times a power of ten, so that the usual step is some columns wide and its tokens fit."""
    steps = [entry for entry in sequence.entries if entry.HasField("step")]
    gaps = [after.at - before.at for before, after in pairwise(steps)]
    usual = median(gaps) if gaps else 0.01
    most = max((len(entry.step.sources) for entry in steps), default=1)
    exact = max(usual, 1e-5) / max(COLUMNS_PER_ROUND, most + 1)
    power = 10.0 ** math.floor(math.log10(exact))
    return max(nice * power for nice in NICE if nice * power <= exact * (1 + 1e-9))


def _axis(first: int, columns: int, scale: float) -> str:
    begin, end = (f"{column * scale * 1e3:.6g} ms" for column in (first, first + columns))
    return " " * LABEL + begin + end.rjust(columns - len(begin))
