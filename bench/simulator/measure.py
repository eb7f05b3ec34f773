"""The real system over real sockets, with table models that take simulated time: what the model is held against.

The scheduler runs here; target, draft worker and the network's delay to each are processes of their own.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.journal import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from scheduler.config import SchedulerConfig
from scheduler.request import Finished, GenerationRequest, Tokens
from scheduler.scheduler import Scheduler
from scheduler.worker import AnyResult, Worker
from services.links import link_factory
from specdec.messages import Committed, DraftBlock, Role
from specdec.params import SamplingParams
from tools.deployment import quick_config
from tools.recorder import MemoryRecorder
from tools.socket_deployment import WorkerProcess
from tools.waiting import until

CONTEXT = 1024
AGREEMENT = 0.8


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that the workers' models take: a forward and each of its rows; a candidate, and each sequence in it."""

    forward: float = 0.020
    row: float = 0.00025
    candidate: float = 0.004
    sequence: float = 0.00025


@dataclass(slots=True)
class Measured:
    """Runs one after the other, each of `sequences` answers of `tokens` side by side until its first has ended, so that
    all of it has that many at a time; everything is of all runs. committed: tokens. steps: rows and seconds of each of
    the target's; drafts: sequences drafted together and seconds per candidate. cpu: seconds of the scheduler's process.
    trials, hits: by depth, candidates whose forerunners were all accepted, and those that were accepted themselves."""

    sequences: int
    tokens: int
    delay: float
    draft_length: int
    window: int
    runs: int = 1
    seconds: float = 0.0
    committed: int = 0
    rounds: int = 0
    messages: int = 0
    items: int = 0
    cpu: float = 0.0
    steps: list[tuple[int, float]] = field(default_factory=list)
    drafts: list[tuple[int, float]] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.committed / self.seconds

    def see(self, results: Sequence[AnyResult]) -> None:
        """A message of a worker."""
        self.messages += 1
        self.items += len(results)
        steps: defaultdict[float, int] = defaultdict(int)
        blocks: list[tuple[int, float]] = []
        for result in results:
            body = result.body
            if isinstance(body, Committed) and body.step_time:
                self.rounds += 1
                self.committed += len(body.token_ids)
                steps[body.step_time] += 1 + body.num_draft_tokens
                self._count(body.num_draft_tokens, len(body.token_ids) - 1)
            elif isinstance(body, DraftBlock) and len(body.candidates):
                blocks.append((body.candidates.draft_length, body.draft_time))
        self.steps += ((rows, seconds) for seconds, rows in steps.items())
        if blocks:  # the one that waited least tells what drafting took
            length, seconds = min(blocks, key=lambda block: block[1])
            self.drafts.append((len(blocks), seconds / length))

    def _count(self, drafted: int, accepted: int) -> None:
        for depth in range(min(accepted + 1, drafted)):
            if depth == len(self.trials):
                self.trials.append(0)
                self.hits.append(0)
            self.trials[depth] += 1
            self.hits[depth] += depth < accepted


class System:
    """`run` answers requests and tells what was measured meanwhile."""

    def __init__(self, scheduler: Scheduler, delay: float, config: SchedulerConfig) -> None:
        self._scheduler, self._delay, self._config = scheduler, delay, config
        self._measured = Measured(0, 0, 0.0, 0, 0)
        pool = scheduler._pool  # the only place that sees every result
        deliver = pool._deliver

        def watched(worker: Worker, results: Sequence[AnyResult]) -> None:
            self._measured.see(results)
            deliver(worker, results)

        pool._deliver = watched

    async def run(self, sequences: int, tokens: int, runs: int = 1) -> Measured:
        await self._ask(0, 20)  # warms up
        measured = Measured(sequences, tokens, self._delay, self._config.draft_length, self._config.window, runs)
        for i in range(runs):
            tasks = [asyncio.create_task(self._ask(i * sequences + j, tokens)) for j in range(sequences)]
            self._measured = measured
            started, cpu = time.perf_counter(), time.process_time()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            measured.seconds += time.perf_counter() - started
            measured.cpu += time.process_time() - cpu
            self._measured = Measured(0, 0, 0.0, 0, 0)
            await asyncio.gather(*tasks)
        return measured

    async def _ask(self, number: int, tokens: int) -> None:
        request = GenerationRequest((1, 2, number), SamplingParams(seed=number), max_tokens=tokens)
        count = 0
        async for event in self._scheduler.generate(request):
            if isinstance(event, Tokens):
                count += len(event.token_ids)
            elif isinstance(event, Finished) and count != tokens:
                raise RuntimeError(f"an answer has {count} tokens, must have {tokens}")


@asynccontextmanager
async def system(timing: Timing, delay: float, draft_length: int = 4, window: int = 1) -> AsyncIterator[System]:
    """delay: of the network between scheduler and each worker, seconds, one way."""
    folder = Path(tempfile.mkdtemp(prefix="sim", dir="/tmp"))
    config = replace(quick_config(draft_length=draft_length), window=window)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        scheduler = Scheduler(config, link_factory(), MemoryRecorder())
        costs = {
            Role.TARGET: ("target", timing.forward, timing.row),
            Role.DRAFT: ("draft", timing.candidate, timing.sequence),
        }
        addresses: list[tuple[Role, str]] = []
        for role, (word, base, each) in costs.items():
            worker, line = f"unix:{folder}/{word}", f"unix:{folder}/{word}-line"
            options = [word, "--context-length", str(CONTEXT), "--base", str(base), "--each", str(each)]
            if role is Role.DRAFT:
                options += ["--agreement", str(AGREEMENT)]
            for module, address, arguments in (
                ("timed", worker, options),
                ("delay_line", line, ["--upstream", worker, "--delay", str(delay)]),
            ):
                await stack.enter_async_context(WorkerProcess(role, module, address, arguments))
            addresses.append((role, line))
        stack.push_async_callback(scheduler.close)
        await scheduler.start()
        for role, address in addresses:
            scheduler.add_worker(role, address)
        await until(lambda: _ready(scheduler), "both workers are ready", patience=30.0)
        yield System(scheduler, delay, config)


async def _ready(scheduler: Scheduler) -> bool:
    views = await scheduler.workers()
    return len(views) == 2 and all(view.state == "ready" for view in views)
