"""The questions of docs/scale.md, each answered by runs of the model: one Markdown table each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.simulator.costs import Costs
from bench.simulator.fleet import FleetConfig
from bench.simulator.redis_load import RedisCosts
from bench.simulator.simulation import Outcome, steady

USERS = 16
"""At a time for each target."""
TOKENS, PROMPT = 200, 200
WARM_UP, SECONDS = 4.0, 6.0
LONGER = 60.0
"""Seconds of one target; several need fewer of them for the same certainty."""
DELAYS_MS = (0.1, 1.0, 5.0, 20.0)
WINDOWS = (1, 2, 3, 4)
FLEETS = (10, 100, 1000)
ENOUGH = 0.97
"""Of what a drafter for each target gives."""
BUSY = 0.7
"""Share of its time that a scheduler may be busy for."""
POLLS_PER_SECOND, LEASE_SECONDS = 2.0, 2.0
"""Polls per second of a scheduler for leases, and seconds between renewals (services.discovery)."""
ROUND_BYTES = 724
"""Of a round's four items as protobuf, with four candidates and trace context."""


def outcome(costs: Costs, config: FleetConfig, users: int = USERS, seconds: float | None = None) -> Outcome:
    seconds = seconds or max(SECONDS, LONGER / config.targets)
    return steady(config, costs, users * config.targets, TOKENS, PROMPT, WARM_UP, seconds)


def windows(costs: Costs) -> str:
    rows = []
    for delay in DELAYS_MS:
        config = FleetConfig(delay=delay / 1e3)
        plain = outcome(costs, replace(config, draft_length=0)).goodput
        found = [outcome(costs, replace(config, window=window)).goodput for window in WINDOWS]
        rows.append([f"{delay:g} ms", f"{plain:.0f}", *(_best(value, found) for value in found)])
    return table(["network, one way", "plain", *(f"window {window}" for window in WINDOWS)], rows)


def users(costs: Costs) -> str:
    rows = []
    for count in (1, 4, 16, 64):
        config = FleetConfig(delay=0.001)
        plain = outcome(costs, replace(config, draft_length=0), count).goodput
        found = [outcome(costs, replace(config, window=window), count).goodput for window in (1, 2)]
        rows.append([str(count), f"{plain:.0f}", *(_best(value, [plain, *found]) for value in found)])
    return table(["at a time", "plain", "window 1", "window 2"], rows)


def drafters(costs: Costs, targets: int = 8) -> str:
    rows = []
    for count in (8, 4, 3, 2, 1):
        one = outcome(costs, FleetConfig(targets, count, delay=0.001))
        rows.append([f"{count} : {targets}", f"{one.goodput:.0f}", f"{one.drafter_busy:.0%}", f"{one.target_busy:.0%}"])
    return table(["drafters : targets", "tokens/s", "drafters busy", "targets busy"], rows)


def schedulers(costs: Costs, counts: Sequence[int] = (4, 8, 12, 16, 24, 32)) -> str:
    rows = []
    for count in counts:
        one = outcome(costs, FleetConfig(count, count, delay=0.001))
        rows.append([str(count), f"{one.goodput / count:.0f}", f"{one.scheduler_busy:.0%}"])
    return table(["targets of one scheduler", "tokens/s of each", "scheduler busy"], rows)


def cell(costs: Costs) -> tuple[int, int, Outcome]:
    """Targets and drafters of the largest cell that one scheduler serves without being too busy, and how it does. The
    drafters are the fewest that give nearly what one for each target gives."""
    found = 1, 1, outcome(costs, FleetConfig(delay=0.001))
    for count in itertools.count(2):
        full = outcome(costs, FleetConfig(count, count, delay=0.001))
        tried = ((n, outcome(costs, FleetConfig(count, n, delay=0.001))) for n in range(1, count))
        drafted, one = next(((n, one) for n, one in tried if one.goodput >= ENOUGH * full.goodput), (count, full))
        if one.scheduler_busy > BUSY:
            break
        found = count, drafted, one
    return found


def fleets(costs: Costs, redis: RedisCosts) -> str:
    """Fleets of cells, each a scheduler with workers of its own, so that a cell is all that must be run; and the same
    where every scheduler sees every worker."""
    targets, drafted, one = cell(costs)
    rows = []
    for count in FLEETS:
        cells = -(-count // targets)
        share = count / targets
        all_drafters = -(-count * drafted // targets)
        rows += [_row(count, all_drafters, cells, one, share, redis, "cells")]
        if count <= 100:
            config = FleetConfig(count, all_drafters, cells, delay=0.001)
            mixed = outcome(costs, config, seconds=2.0)
            rows += [_row(count, all_drafters, cells, mixed, 1.0, redis, "all see all")]
    return table(
        ["targets", "schedulers see", "drafters", "schedulers", "tokens/s", "scheduler busy", "Redis busy", "network"],
        rows,
    )


def _row(
    targets: int, drafters: int, schedulers: int, one: Outcome, share: float, redis: RedisCosts, see: str
) -> list[str]:
    """share: what all do as a multiple of what was run."""
    rounds = one.rounds_per_second * share
    busy = redis_busy(redis, rounds, targets + drafters, schedulers)
    return [
        str(targets),
        see,
        str(drafters),
        str(schedulers),
        f"{one.goodput * share:.0f}",
        f"{one.scheduler_busy:.0%}",
        f"{busy:.0%}",
        f"{rounds * ROUND_BYTES * 8 / 1e6:.0f} Mbit/s",
    ]


def redis_busy(redis: RedisCosts, rounds: float, workers: int, schedulers: int) -> float:
    """Share of the time of its one thread. rounds: per second."""
    polls = schedulers * workers * POLLS_PER_SECOND * redis.read
    return rounds * redis.record + workers / LEASE_SECONDS * redis.renew + polls


def redis_limit(costs: Costs, redis: RedisCosts) -> int:
    """Targets, in cells, that keep one Redis as busy as a scheduler may be."""
    targets, drafted, one = cell(costs)

    def busy(cells: int) -> float:
        return redis_busy(redis, one.rounds_per_second * cells, (targets + drafted) * cells, cells)

    return targets * next(cells for cells in itertools.count(1) if busy(cells + 1) > BUSY)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_lines([head, ["---"] * len(head), *rows]))


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _best(value: float, values: Sequence[float]) -> str:
    return f"**{value:.0f}**" if value == max(values) else f"{value:.0f}"
