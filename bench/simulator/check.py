"""How well the model predicts: calibrated on one sequence and on four, it is held against what it has not seen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulator.calibration import calibrate, predict
from bench.simulator.costs import Costs
from bench.simulator.measure import Measured, System, Timing, system

DELAY, SECOND_DELAY = 0.001, 0.008
WINDOW = 2
GOAL = 0.10


@dataclass(frozen=True, slots=True)
class Checked:
    """goal: it must be predicted within GOAL; the others are only told. Tokens per second."""

    name: str
    goal: bool
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


async def check(scale: float = 1.0) -> tuple[Costs, list[Checked]]:
    """scale: of the lengths of the answers; less is quicker and less certain."""
    tokens = round(200 * scale)
    async with system(Timing(), DELAY) as real:
        one, few = await _quickest(real, 1, tokens // 2, 4), await _quickest(real, 4, tokens)
        many = await _quickest(real, 16, tokens)
    async with system(Timing(), SECOND_DELAY) as real:
        far = [await _quickest(real, 4, tokens), await _quickest(real, 16, tokens)]
    async with system(Timing(), DELAY, window=WINDOW) as real:
        ahead = [await _quickest(real, 1, tokens), await _quickest(real, 16, tokens)]
    costs = calibrate(one, few)
    runs = [(one, False), (few, False), (many, True), *((run, True) for run in far), *((run, False) for run in ahead)]
    return costs, [_checked(costs, run, goal) for run, goal in runs]


async def _quickest(real: System, sequences: int, tokens: int, runs: int = 1) -> Measured:
    """Of two: what else goes on on the machine can only make it slower."""
    tries = [await real.run(sequences, tokens, runs) for _ in range(2)]
    return min(tries, key=lambda run: run.seconds)


def _checked(costs: Costs, run: Measured, goal: bool) -> Checked:
    window = f", window {run.window}" if run.window > 1 else ""
    name = f"{run.sequences} at a time, network {run.delay * 1e3:g} ms{window}"
    predicted = statistics.fmean(outcome.goodput for outcome in predict(costs, run))
    return Checked(name, goal, run.goodput, predicted)


def table(checked: Sequence[Checked]) -> str:
    rows = [
        f"| {one.name} | {one.measured:.1f} | {one.predicted:.1f} | {one.error:+.1%} | {_purpose(one, i)} |"
        for i, one in enumerate(checked)
    ]
    return "\n".join(["| | measured | predicted | error | |", "|---|---|---|---|---|", *rows])


def _purpose(one: Checked, index: int) -> str:
    if index < 2:
        return "calibrated on"
    return f"within {GOAL:.0%}" if one.goal else "told only"
