"""The real scheduler over workers in virtual time, and the figures that policies are compared by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from scheduler.config import Policy, SchedulerConfig
from scheduler.links import AnyLink
from scheduler.request import GenerationRequest, Speculation
from scheduler.scheduler import Scheduler
from specdec.goodput import Explained
from specdec.messages import Role
from specdec.params import SamplingParams
from tools.deployment import SystemUnderTest
from tools.process import SECRET
from tools.recorder import MemoryRecorder
from tools.virtual_text import Luck
from tools.virtual_time import run_virtually
from tools.virtual_workers import Costs, VirtualDrafter, VirtualTarget
from tools.waiting import until

PLAIN = 0
"""As a draft length: no speculation at all."""
GOODPUT = SchedulerConfig("virtual", SECRET, policy=Policy.GOODPUT)


class VirtualSystem(SystemUnderTest):
    """Within `run_virtually` alone."""

    def __init__(self, scheduler: Scheduler, target: VirtualTarget, drafter: VirtualDrafter) -> None:
        super().__init__(scheduler, MemoryRecorder())
        self.target = target
        self.drafter = drafter

    async def seconds(self, batch: int, number: int, tokens: int, draft_length: int | None = None) -> float:
        """Of a batch of answers. draft_length: fixed, None: as the policy decides."""
        mode = Speculation.AUTO if draft_length is None else Speculation.ON if draft_length else Speculation.OFF
        began = time.monotonic()
        requests = [
            GenerationRequest(
                ((batch * number + i) % 60, 1, 2, 3),
                SamplingParams(temperature=0.0),
                max_tokens=tokens,
                speculation=mode,
                draft_length=draft_length or None,
            )
            for i in range(batch)
        ]
        answers = await asyncio.gather(*(self.generate(request) for request in requests))
        assert all(len(answer.token_ids) == tokens for answer in answers)
        self.last = [self.scheduler.explained(answer.started.sequence_id) for answer in answers]
        return time.monotonic() - began

    last: Sequence[Sequence[Explained]] = ()


@asynccontextmanager
async def virtual_system(costs: Costs, luck: Luck, config: SchedulerConfig = GOODPUT) -> AsyncIterator[VirtualSystem]:
    """A deployment that knows nothing of its workers yet."""
    machine = asyncio.Lock() if costs.shared else None
    target, drafter = VirtualTarget(costs, machine), VirtualDrafter(costs, luck, machine)

    def make_link(role: Role, address: str) -> AnyLink:
        return target if role is Role.TARGET else drafter

    scheduler = Scheduler(config, make_link, MemoryRecorder())
    system = VirtualSystem(scheduler, target, drafter)
    await scheduler.start()
    try:
        for role in (Role.TARGET, Role.DRAFT):
            scheduler.add_worker(role, role.value)
        await until(system.settled, "both workers are ready")
        yield system
    finally:
        await scheduler.close()


def seconds(
    costs: Costs,
    luck: Luck,
    batch: int,
    requests: int,
    tokens: int,
    draft_length: int | None = None,
) -> list[float]:
    """Of consecutive batches on a deployment that starts cold."""

    async def run() -> list[float]:
        async with virtual_system(costs, luck) as system:
            return [await system.seconds(batch, number, tokens, draft_length) for number in range(requests)]

    return run_virtually(run())
