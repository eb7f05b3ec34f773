"""From what few sequences were measured to cost to the costs of a model: nothing here sees a larger batch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.simulator.costs import Costs, Curve
from bench.simulator.fleet import FleetConfig
from bench.simulator.measure import Measured
from bench.simulator.simulation import Outcome, together

SEEDS = 8
HALVINGS = 12
PASSES = 3
MOST = 0.01
"""Seconds that no hop and no item takes."""


def calibrate(one: Measured, few: Measured) -> Costs:
    """one: a single sequence; few: some at a time, over the same network. What a round of one takes besides what its
    parts do is the hops; what a round of few takes more than the model says then is their items in the workers."""
    verify = line_through(one.steps + few.steps)
    draft = line_through(one.drafts + few.drafts)
    message, item = _scheduler(one, few)
    costs = Costs(verify, draft, 0.0, 0.0, message, item, _acceptance(one, few))
    for _ in range(PASSES):
        costs = _fitted(costs, lambda costs, value: replace(costs, hop=value), one)
        costs = _fitted(costs, lambda costs, value: replace(costs, worker_item=value), few)
    return costs


def predict(costs: Costs, like: Measured, seeds: int = SEEDS) -> list[Outcome]:
    """The same run in the model, once for each seed."""
    config = FleetConfig(delay=like.delay, draft_length=like.draft_length, window=like.window)
    return [together(config, costs, like.sequences, like.tokens, seed=seed) for seed in range(seeds)]


def line_through(points: Sequence[tuple[float, float]]) -> Curve:
    """Least squares through the median at each x, so that a step that something else held up does not count; with one
    x only: constant."""
    by_x: defaultdict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    weights = {x: len(ys) for x, ys in by_x.items()}
    medians = {x: statistics.median(ys) for x, ys in by_x.items()}
    mean_x = sum(x * weights[x] for x in weights) / len(points)
    mean_y = sum(medians[x] * weights[x] for x in weights) / len(points)
    spread = sum(weights[x] * (x - mean_x) ** 2 for x in weights)
    slope = sum(weights[x] * (x - mean_x) * (medians[x] - mean_y) for x in weights) / spread if spread else 0.0
    return Curve.line(mean_y - slope * mean_x, slope)


def _scheduler(one: Measured, few: Measured) -> tuple[float, float]:
    """Seconds per message and per item, from the time that its process computed."""
    a, b = (run.messages / run.items for run in (one, few))
    per_item, per_item_of_few = one.cpu / one.items, few.cpu / few.items
    message = max((per_item - per_item_of_few) / (a - b), 0.0) if a > b else 0.0
    return message, max(per_item_of_few - message * b, 0.0)


def _acceptance(*runs: Measured) -> tuple[float, ...]:
    depths = max(len(run.trials) for run in runs)
    return tuple(
        sum(run.hits[depth] for run in runs if depth < len(run.hits))
        / sum(run.trials[depth] for run in runs if depth < len(run.trials))
        for depth in range(depths)
    )


def _fitted(costs: Costs, put: Callable[[Costs, float], Costs], run: Measured) -> Costs:
    """With the value in [0, MOST] put in under which the model makes as many rounds a second as were measured."""
    low, high = 0.0, MOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        rate = statistics.fmean(outcome.rounds_per_second for outcome in predict(put(costs, middle), run))
        low, high = (middle, high) if rate > run.rounds / run.seconds else (low, middle)
    return put(costs, (low + high) / 2)
