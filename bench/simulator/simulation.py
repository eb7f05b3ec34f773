"""One run of a fleet: who asks when, and what came out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import simpy

from bench.simulator.costs import Costs
from bench.simulator.fleet import Fleet, FleetConfig, Process
from bench.simulator.sequence import SimSequence


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, seconds; rows of its prompt; tokens of its answer."""

    at: float
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """goodput: committed tokens per second that the users saw. batch: rows of a step. The shares are of the time in
    which a process of that kind was busy, on average. waits: seconds to the first token of each request, sorted."""

    seconds: float
    goodput: float
    rounds_per_second: float
    batch: float
    acceptance: float
    target_busy: float
    drafter_busy: float
    scheduler_busy: float
    items_per_second: float
    waits: tuple[float, ...]

    def wait(self, share: float) -> float:
        """Quantile of the time to the first token; nan without any."""
        return self.waits[min(int(share * len(self.waits)), len(self.waits) - 1)] if self.waits else float("nan")


def poisson(rate: float, seconds: float, prompt: int, tokens: int, seed: int = 0) -> list[Arrival]:
    """Requests that come independently, `rate` per second, with answers of `tokens` on average (exponential)."""
    rng, now, arrivals = random.Random(seed), 0.0, list[Arrival]()
    while (now := now + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(now, prompt, 1 + round(rng.expovariate(1 / tokens))))
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """JSON lines with `at`, `prompt` and `tokens`. Raises ValueError, OSError."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return sorted((Arrival(row["at"], row["prompt"], row["tokens"]) for row in rows), key=lambda arrival: arrival.at)


def together(config: FleetConfig, costs: Costs, requests: int, tokens: int, prompt: int = 3, seed: int = 0) -> Outcome:
    """So many requests at once, until the first has ended: all the time there are that many."""
    env = simpy.Environment()
    fleet = Fleet(env, config, costs, random.Random(seed))
    first = env.event()

    def end(_: SimSequence) -> None:
        if not first.triggered:
            first.succeed()

    fleet.on_finished = end
    for _ in range(requests):
        fleet.add(SimSequence(tokens, prompt, 0.0))
    env.run(first)
    return _outcome(fleet, env.now, (0.0, 0.0, 0.0, 0, 0, 0))


def arriving(
    config: FleetConfig, costs: Costs, arrivals: Iterable[Arrival], seconds: float | None = None, seed: int = 0
) -> Outcome:
    """A trace of arrivals, for `seconds` or until all have ended."""
    env = simpy.Environment()
    fleet = Fleet(env, config, costs, random.Random(seed))
    env.process(_arrive(fleet, arrivals))
    env.run(seconds)
    return _outcome(fleet, env.now, (0.0, 0.0, 0.0, 0, 0, 0))


def steady(
    config: FleetConfig,
    costs: Costs,
    users: int,
    tokens: int,
    prompt: int,
    warm_up: float,
    seconds: float,
    seed: int = 0,
) -> Outcome:
    """`users` that ask again as soon as they were answered, looked at after the warm-up. Answers have `tokens` on
    average; users begin at times of their own."""
    env = simpy.Environment()
    rng = random.Random(seed)
    fleet = Fleet(env, config, costs, rng)

    def ask(_: SimSequence | None = None) -> None:
        fleet.add(SimSequence(1 + round(rng.expovariate(1 / tokens)), prompt, env.now))

    def begin() -> simpy.events.ProcessGenerator:
        for _ in range(users):
            yield env.timeout(warm_up / 2 / users)
            ask()

    fleet.on_finished = ask
    env.process(begin())
    env.run(warm_up)
    targets, drafters, schedulers = (_busy(part) for part in (fleet.targets, fleet.drafters, fleet.schedulers))
    before = (targets, drafters, schedulers, fleet.tokens, fleet.verdicts, fleet.items)
    fleet.steps = fleet.rows = fleet.drafted = fleet.accepted = 0
    fleet.waits.clear()
    env.run(warm_up + seconds)
    return _outcome(fleet, seconds, before)


def _arrive(fleet: Fleet, arrivals: Iterable[Arrival]) -> simpy.events.ProcessGenerator:
    for arrival in arrivals:
        if arrival.at > fleet.env.now:
            yield fleet.env.timeout(arrival.at - fleet.env.now)
        fleet.add(SimSequence(arrival.tokens, arrival.prompt, fleet.env.now))


def _busy(processes: Sequence[Process]) -> float:
    return sum(process.busy for process in processes) / max(len(processes), 1)


def _outcome(fleet: Fleet, seconds: float, before: tuple[float, float, float, int, int, int]) -> Outcome:
    """before: the counts at the beginning of `seconds`."""
    targets, drafters, schedulers, tokens, verdicts, items = before
    return Outcome(
        seconds=seconds,
        goodput=(fleet.tokens - tokens) / seconds,
        rounds_per_second=(fleet.verdicts - verdicts) / seconds,
        batch=fleet.rows / max(fleet.steps, 1),
        acceptance=fleet.accepted / max(fleet.drafted, 1),
        target_busy=(_busy(fleet.targets) - targets) / seconds,
        drafter_busy=(_busy(fleet.drafters) - drafters) / seconds,
        scheduler_busy=(_busy(fleet.schedulers) - schedulers) / seconds,
        items_per_second=(fleet.items - items) / seconds,
        waits=tuple(sorted(fleet.waits)),
    )
