"""The processes of a fleet. Each handles one message or step at a time; messages take the network's time."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from bench.simulator.costs import Costs
from bench.simulator.sequence import Block, SimSequence, Verdict

Steps = Generator[simpy.Event, Any, None]
MAX_DRAFT_BATCH = 64
TOKEN_BUDGET = 512


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """delay: seconds of the network, one way. draft_length 0: plain decoding."""

    targets: int = 1
    drafters: int = 1
    schedulers: int = 1
    delay: float = 0.0
    draft_length: int = 4
    window: int = 1
    token_budget: int = TOKEN_BUDGET


class Process(ABC):
    """Something with one thread: `busy` seconds so far, and items waiting for it."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._waiting: list[Any] = []
        self._messages = 0
        self._woken = env.event()
        self.busy = 0.0
        env.process(self._run())

    def receive(self, items: Sequence[Any]) -> None:
        self._waiting += items
        self._messages += 1
        if not self._woken.triggered:
            self._woken.succeed()

    def _take(self) -> list[Any]:
        taken, self._waiting = self._waiting, []
        return taken

    def _work(self, seconds: float) -> simpy.Event:
        self.busy += seconds
        return self._env.timeout(seconds)

    def _sleep(self) -> simpy.Event:
        if self._waiting:
            return self._env.timeout(0)
        self._woken = self._env.event()
        return self._woken

    @abstractmethod
    def _run(self) -> Steps: ...


class Fleet:
    """`add` sequences, run the environment, and read what it counted."""

    def __init__(self, env: simpy.Environment, config: FleetConfig, costs: Costs, rng: random.Random) -> None:
        self.env, self.config, self.costs, self.rng = env, config, costs, rng
        self.tokens = 0
        self.verdicts = self.drafted = self.accepted = self.steps = self.rows = self.items = 0
        self.waits: list[float] = []
        self.on_finished: Callable[[SimSequence], None] = lambda sequence: None
        self.schedulers = [Scheduler(self) for _ in range(config.schedulers)]
        self.targets = [Target(self) for _ in range(config.targets)]
        self.drafters = [Drafter(self) for _ in range(config.drafters if config.draft_length else 0)]
        self._loads = [[0] * config.targets, [0] * max(len(self.drafters), 1)]
        self._turn = 0

    def add(self, sequence: SimSequence) -> None:
        """At the least loaded target and drafter, and a scheduler in turn."""
        self._turn = (self._turn + 1) % self.config.schedulers
        sequence.scheduler = self._turn
        sequence.target, sequence.drafter = (loads.index(min(loads)) for loads in self._loads)
        self._loads[0][sequence.target] += 1
        self._loads[1][sequence.drafter] += 1
        self.schedulers[sequence.scheduler].receive([sequence])

    def remove(self, sequence: SimSequence) -> None:
        self._loads[0][sequence.target] -= 1
        self._loads[1][sequence.drafter] -= 1
        self.on_finished(sequence)

    def send(self, to: Process, items: Sequence[Any]) -> None:
        """One message."""
        self.items += len(items)
        sent = simpy.Timeout(self.env, self.costs.hop + self.config.delay)
        sent.callbacks.append(lambda _: to.receive(items))


class Scheduler(Process):
    """Forwards blocks to targets, and verdicts to drafters."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.env)
        self._fleet = fleet

    def _run(self) -> Steps:
        while True:
            yield self._sleep()
            messages, self._messages = self._messages, 0
            items = self._take()
            costs = self._fleet.costs
            yield self._work(costs.scheduler_message * messages + costs.scheduler_item * len(items))
            self._forward(items)

    def _forward(self, items: Sequence[Any]) -> None:
        fleet = self._fleet
        messages: dict[Process, list[Any]] = defaultdict(list)
        for item in items:
            sequence = item if isinstance(item, SimSequence) else item.sequence
            if isinstance(item, Verdict):
                self._told(item)
            else:
                messages[fleet.targets[sequence.target]].append(item)
            if not isinstance(item, Block) and fleet.drafters:
                messages[fleet.drafters[sequence.drafter]].append(item)
        for to, message in messages.items():
            fleet.send(to, message)

    def _told(self, verdict: Verdict) -> None:
        fleet, sequence = self._fleet, verdict.sequence
        fleet.tokens += verdict.length - sequence.known
        if not sequence.known:
            sequence.first_token_at = fleet.env.now
            fleet.waits.append(fleet.env.now - sequence.arrived)
        sequence.known = verdict.length
        if sequence.known >= sequence.max_tokens:
            fleet.remove(sequence)


class Target(Process):
    """Steps with all that it may verify, in one forward."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.env)
        self._fleet = fleet
        self._sequences: dict[SimSequence, None] = {}

    def _run(self) -> Steps:
        fleet = self._fleet
        while True:
            items = self._take()
            for item in items:
                self._receive(item)
            batch = self._batch()
            rows = sum(rows for _, rows in batch)
            seconds = len(items) * fleet.costs.worker_item + (fleet.costs.verify(rows) if batch else 0.0)
            if not seconds:
                yield self._sleep()
                continue
            yield self._work(seconds)
            self._answer([sequence for sequence, _ in batch], rows)

    def _receive(self, item: SimSequence | Block) -> None:
        if isinstance(item, Block):
            item.sequence.offer(item)
        else:
            self._sequences[item] = None

    def _batch(self) -> list[tuple[SimSequence, int]]:
        """Sequences with their rows."""
        fleet, left = self._fleet, self._fleet.config.token_budget
        batch: list[tuple[SimSequence, int]] = []
        for sequence in self._sequences:
            block = sequence.pending
            if block is None and fleet.drafters:
                continue
            rows = 1 if block is None else 1 + max(min(block.end, sequence.max_tokens - 1) - sequence.length, 0)
            rows += 0 if sequence.prefilled else sequence.prompt - 1
            if not batch or rows <= left:
                batch.append((sequence, rows))
                left -= rows
        return batch

    def _answer(self, batch: Sequence[SimSequence], rows: int) -> None:
        fleet = self._fleet
        messages: dict[Process, list[Verdict]] = defaultdict(list)
        for sequence in batch:
            sequence.prefilled = True
            verdict = sequence.verify()
            fleet.verdicts += 1
            fleet.drafted += verdict.drafted
            fleet.accepted += verdict.accepted
            messages[fleet.schedulers[sequence.scheduler]].append(verdict)
            del self._sequences[sequence]
            if not sequence.finished:
                self._sequences[sequence] = None  # behind those that had no room
        fleet.steps += bool(batch)
        fleet.rows += rows
        for to, message in messages.items():
            fleet.send(to, message)


class Drafter(Process):
    """Drafts for all sequences whose next block is due, together."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.env)
        self._fleet = fleet
        self._due: dict[SimSequence, None] = {}

    def _run(self) -> Steps:
        costs, length = self._fleet.costs, self._fleet.config.draft_length
        while True:
            items = self._take()
            for item in items:
                self._receive(item)
            batch = [(sequence, sequence.version) for sequence in list(self._due)[:MAX_DRAFT_BATCH]]
            seconds = len(items) * costs.worker_item + (length * costs.draft(len(batch)) if batch else 0.0)
            if not seconds:
                yield self._sleep()
                continue
            yield self._work(seconds)
            news = self._take()  # the worker looks for news between two tokens
            if news:
                yield self._work(len(news) * costs.worker_item)
            for item in news:
                self._receive(item)
            self._answer([sequence for sequence, version in batch if sequence.version == version])

    def _receive(self, item: SimSequence | Verdict) -> None:
        if isinstance(item, Verdict):
            item.sequence.advance(item.length)
            self._look(item.sequence)
        else:
            self._look(item)

    def _look(self, sequence: SimSequence) -> None:
        """Whether its next block is due: the window has room."""
        wanted = len(sequence.in_flight) < self._fleet.config.window and sequence.draft_log < sequence.max_tokens
        if wanted:
            self._due[sequence] = None
        else:
            self._due.pop(sequence, None)

    def _answer(self, batch: Sequence[SimSequence]) -> None:
        fleet = self._fleet
        messages: dict[Process, list[Block]] = defaultdict(list)
        for sequence in batch:
            rights = [fleet.rng.random() < fleet.costs.accepts(depth) for depth in range(fleet.config.draft_length)]
            messages[fleet.schedulers[sequence.scheduler]].append(sequence.drafted(rights))
            self._look(sequence)
        for to, message in messages.items():
            fleet.send(to, message)
