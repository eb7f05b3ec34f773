"""Workers in virtual time: the real rules of the log and the real selection, and forwards that only take time.

Each is a task of the event loop, and its own link too. What a forward takes is a function of its rows; on shared
hardware target and drafter take turns.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from draft_worker.config import DraftConfig
from draft_worker.intake import Intake as DraftIntake
from draft_worker.sequence import DraftSequence
from specdec.candidates import ROOT, CandidateTree
from specdec.commit import TokenSource, commit
from specdec.log import Log
from specdec.messages import (
    Committed,
    DraftBlock,
    DraftResult,
    Header,
    Identity,
    Load,
    Prefilled,
    TargetResult,
    TokenizerBundle,
)
from target_worker.batch import Selector, Work
from target_worker.config import TargetConfig
from target_worker.gathering import Gathering
from target_worker.intake import Intake as TargetIntake
from tools.identities import draft_identity, target_identity, tokenizer_bundle
from tools.process import SECRET
from tools.virtual_text import VOCABULARY_SIZE, Luck, chain, token

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. verify: of a forward by its rows. draft: of one candidate by the sequences drafted together. catch_up:
    of each token that a drafter was not told before and must read first. link: one way. shared: both on the same
    cores."""

    verify: Callable[[int], float]
    draft: Callable[[int], float]
    catch_up: float = 0.0
    link: float = 0.0005
    shared: bool = False

    @property
    def turns(self) -> str:
        """As the workers announce it."""
        return "the machine" if self.shared else ""


class VirtualWorker(ABC):
    """Implements `scheduler.links.WorkerLink`."""

    def __init__(self, address: str, identity: Identity, link: float, machine: asyncio.Lock | None) -> None:
        self.address = address
        self.identity = identity
        self._link = link
        self._machine = machine
        self._items: list[tuple[Any, float]] = []
        self._sent: deque[Sequence[Any]] = deque()
        self._answered: deque[Sequence[Any]] = deque()
        self._news = asyncio.Event()
        self._deliver: Callable[[Sequence[Any]], None] = lambda results: None
        self._task: asyncio.Task[None] | None = None

    async def identify(self) -> Identity:
        return self.identity

    async def id_digests(self, run: int) -> bytes:
        return b""

    async def open(self, deliver: Callable[[Sequence[Any]], None], lost: Callable[[str], None]) -> None:
        self._deliver = deliver
        self._task = asyncio.create_task(self._run())

    def send(self, items: Sequence[Any]) -> None:
        self._hop(self._sent, self._arrive, items)

    def _hop(self, under_way: deque[Sequence[Any]], arrive: Callable[[list[Any]], None], items: Sequence[Any]) -> None:
        """Timers of one moment ring in any order, but a link keeps what it carries in order."""
        under_way.append(items)
        asyncio.get_running_loop().call_later(self._link, lambda: arrive(list(under_way.popleft())))

    async def load(self) -> Load:
        return Load()

    async def tokenizer(self) -> TokenizerBundle:
        return tokenizer_bundle(self.identity)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @abstractmethod
    async def _turn(self) -> float | None:
        """Does one step of work; how long to wait for news if there was none to do, None: for ever."""

    async def _run(self) -> None:
        while True:
            wait = await self._turn()
            if wait == 0.0 or self._items:
                continue
            self._news.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                pass

    def _arrive(self, items: list[Any]) -> None:
        self._items += [(item, time.monotonic()) for item in items]
        self._news.set()

    def _take(self) -> list[tuple[Any, float]]:
        """What came, and when."""
        items, self._items = self._items, []
        return items

    def _answer(self, results: Sequence[Any]) -> None:
        if results:
            self._hop(self._answered, self._deliver, results)

    def _turn_of_machine(self) -> AbstractAsyncContextManager[object]:
        return nullcontext() if self._machine is None else self._machine


class _NoModel:
    """Keeps count of KV and computes nothing."""

    name = "virtual"
    vocabulary_size = VOCABULARY_SIZE
    context_length = 8192
    device, dtype = "cpu", "float32"
    blocks_used = blocks_total = 0
    numeric_noise = 0.0

    def __init__(self) -> None:
        self._kv: dict[str, int] = {}

    def open(self, sequence_id: str, log: Log) -> int:
        self._kv[sequence_id] = 0
        return 0

    def kv_length(self, sequence_id: str) -> int:
        return self._kv[sequence_id]

    def reserve(self, sequence_id: str, rows: int) -> bool:
        return True

    def forward(self, segments: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def keep(self, sequence_id: str, rows: Sequence[int]) -> None:
        self._kv[sequence_id] += len(rows)

    def truncate(self, sequence_id: str, length: int) -> None:
        self._kv[sequence_id] = min(self._kv[sequence_id], length)

    def release(self, sequence_id: str) -> None:
        self._kv.pop(sequence_id, None)


class VirtualTarget(VirtualWorker):
    """steps: sequences and rows of every forward that decided something. busy: seconds in forwards."""

    def __init__(self, costs: Costs, machine: asyncio.Lock | None) -> None:
        identity = target_identity("target", VOCABULARY_SIZE, 8192)
        super().__init__("target", replace(identity, turns=costs.turns), costs.link, machine)
        self._verify = costs.verify
        self._model = _NoModel()
        config = TargetConfig("target", SECRET)
        self._intake = TargetIntake(config, self._model, Load())
        self._selector = Selector(config, self._model)
        self._gathering = Gathering()
        self.steps: list[tuple[int, int]] = []
        self.busy = 0.0

    async def _turn(self) -> float | None:
        now = time.monotonic()
        self._receive(now)
        batch = self._selector.select(self._intake.sequences.values(), now + _EPSILON)
        if hold := self._gathering.hold(batch, self._intake.sequences.values(), now):
            return hold + _EPSILON
        if not batch:
            waiting = [s.plain_step_at() for s in self._intake.sequences.values() if not s.finished]
            soonest = min((at for at in waiting if at > now), default=None)
            return None if soonest is None or soonest == float("inf") else soonest - now + _EPSILON
        began = time.monotonic()
        async with self._turn_of_machine():
            rows = sum(len(work.segment.token_ids) for work in batch)
            await asyncio.sleep(self._verify(rows))
        step_time = time.monotonic() - began
        self.busy += step_time
        self._gathering.forwarded(rows, step_time)
        if any(work.decides for work in batch):
            self.steps.append((len(batch), rows))
        self._answer([result for work in batch for result in self._decided(work, len(batch), step_time)])
        return 0.0

    def _receive(self, now: float) -> None:
        for item, arrived in self._take():
            self._gathering.answered(self._intake.sequences.get(item.header.sequence_id), arrived)
            self._answer(self._intake.take(1, item, now))

    def _decided(self, work: Work, batch_size: int, step_time: float) -> list[TargetResult]:
        sequence = work.sequence
        if self._intake.sequences.get(sequence.sequence_id) is not sequence:
            return []  # released meanwhile
        if work.candidates is None:
            self._model.keep(sequence.sequence_id, range(work.missing))
            length = self._model.kv_length(sequence.sequence_id)
            return [TargetResult(sequence.header(length), Prefilled(length))]
        length = len(sequence.log)
        token_ids, accepted = _walk(work.candidates, length - sequence.stop.prompt_length)
        kept = commit(length, token_ids, sequence.stop, self._model.context_length)
        last = TokenSource.BONUS if len(work.candidates) else TokenSource.PLAIN
        sources = (*[TokenSource.ACCEPTED] * accepted, last)[: len(kept.token_ids)]
        self._model.keep(sequence.sequence_id, range(work.missing + len(kept.token_ids) - 1))
        body = Committed(
            kept.token_ids,
            sources,
            len(work.candidates),
            work.candidates.draft_length,
            kept.finish_reason,
            step_time,
            batch_size,
        )
        header = sequence.header(length)
        self._gathering.committed(sequence, len(kept.token_ids))
        sequence.append(body, time.monotonic())
        return [TargetResult(header, body), *self._intake.reconsider_held(sequence)]


def _walk(candidates: CandidateTree, position: int) -> tuple[list[int], int]:
    """What the target says from `position` on: down the tree, and one token more. And how many were candidates."""
    token_ids: list[int] = []
    node = ROOT
    while True:
        token_ids.append(token(position + len(token_ids)))
        below = [i for i in candidates.children(node) if candidates.token_ids[i] == token_ids[-1]]
        if not below:
            return token_ids, len(token_ids) - 1
        node = below[0]


class _NoDrafter:
    name = "virtual"
    context_length = 0

    def draft(self, jobs: Sequence[Any], abandoned: object = None) -> list[CandidateTree]:
        raise NotImplementedError

    def release(self, sequence_id: str) -> None:
        """Holds nothing."""


@dataclass(slots=True)
class _Making:
    """A block in the making."""

    sequence: DraftSequence
    since: float
    digest: bytes
    length: int
    planned: Sequence[tuple[int, float | None]]

    @property
    def wanted(self) -> bool:
        return self.sequence.log.digest == self.digest


class VirtualDrafter(VirtualWorker):
    """jobs: blocks made. busy: seconds in forwards."""

    def __init__(self, costs: Costs, luck: Luck, machine: asyncio.Lock | None) -> None:
        identity = draft_identity("draft", drafter="virtual")
        super().__init__("draft", replace(identity, turns=costs.turns), costs.link, machine)
        self._costs = costs
        self._luck = luck
        self._intake = DraftIntake(DraftConfig("draft", SECRET), _NoDrafter(), VOCABULARY_SIZE, Load())
        self._read: dict[str, int] = {}
        self.jobs = 0
        self.busy = 0.0

    async def _turn(self) -> float | None:
        self._receive()
        due = [(len(s.in_flight), s.due_since, s) for s in self._intake.sequences.values() if s.due_since is not None]
        due.sort(key=lambda entry: entry[:2])
        if not due:
            return None
        making = [self._plan(sequence, since) for _, since, sequence in due[:64]]
        await self._work(sum(self._missing(one) for one in making) * self._costs.catch_up)
        for step in range(max(len(one.planned) for one in making)):
            left = [one for one in making if one.wanted and len(one.planned) > step]
            if left:
                await self._work(self._costs.draft(len(left)))
                self._receive()
        self._answer([result for one in making for result in self._made(one)])
        return 0.0

    async def _work(self, seconds: float) -> None:
        if seconds:
            async with self._turn_of_machine():
                await asyncio.sleep(seconds)
            self.busy += seconds

    def _receive(self) -> None:
        now = time.monotonic()
        told = [self._intake.take(1, item, now) for item, _ in self._take()]
        self._answer([result for result in told if result is not None])

    def _missing(self, one: _Making) -> int:
        """Tokens to read before the first candidate, besides the last ones, which it reads anyway."""
        name, length = one.sequence.sequence_id, len(one.sequence.log)
        missing = length - self._read.get(name, 0)
        self._read[name] = length
        return max(missing - 2, 0)

    def _plan(self, sequence: DraftSequence, since: float) -> _Making:
        job = sequence.job()
        position = len(job.log) - job.stop.prompt_length
        planned: list[tuple[int, float | None]] = []
        sure = 1.0
        for token_id, guess in chain(self._luck, job.log.token_ids[0], position, job.draft_length):
            planned.append((token_id, guess.confidence))
            sure *= 1.0 if guess.confidence is None else guess.confidence
            if sure < job.min_confidence:
                break
        return _Making(sequence, since, sequence.log.digest, len(job.log), planned)

    def _made(self, one: _Making) -> list[DraftResult]:
        sequence = one.sequence
        if not one.wanted or self._intake.sequences.get(sequence.sequence_id) is not sequence:
            return []
        tree = CandidateTree.chain(token_id for token_id, _ in one.planned)
        sure = tuple(confidence for _, confidence in one.planned if confidence is not None)
        tree = CandidateTree(tree.token_ids, tree.parents, (), sure)
        self.jobs += 1
        self._read[sequence.sequence_id] = one.length + len(tree)
        header = Header(sequence.sequence_id, sequence.epoch, one.length, one.digest)
        said_nothing = not len(tree) and bool(sequence.in_flight)
        now = time.monotonic()
        sequence.sent(tree, now)
        return [] if said_nothing else [DraftResult(header, DraftBlock(tree, now - one.since))]
