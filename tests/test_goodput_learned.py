"""What is learned of a drafter, in virtual time, where it has nothing to propose and where a probe is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from scheduler.config import SchedulerConfig
from scheduler.counters import NO_COUNTERS
from scheduler.drafting import Drafting
from scheduler.journal import Journal
from scheduler.request import GenerationRequest
from scheduler.tally import Tally
from scheduler.worker import Worker, WorkerState
from specdec.costs import DrafterModel, TargetModel, TargetStep
from specdec.goodput_policy import GoodputPolicy, Limits
from specdec.log import Log
from specdec.messages import DraftBlock, DraftPlan, DraftResult, Epoch, Header, Role
from specdec.observations import NOTHING_PROPOSED, BlockOutcome, PlainStep, Trial
from specdec.params import StopConditions
from specdec.rates import Acceptance, DrafterAcceptance
from tools.process import SECRET
from tools.virtual_system import virtual_system
from tools.virtual_text import copying, steady, token
from tools.virtual_time import run_virtually
from tools.virtual_workers import Costs, VirtualDrafter

PROMPT = (5, 1, 2)
PER_CANDIDATE, CATCH_UP = 0.02, 0.1
LENGTH = 4


def test_empty_blocks_measure_the_link() -> None:
    """Of a drafter that never has a candidate no other block does, and its way would count as waiting."""
    costs = Costs(verify=lambda rows: 0.02, draft=lambda batch: 0.001, link=0.004)

    async def link() -> float:
        async with virtual_system(costs, copying(right=1.0, found=0.0)) as system:
            await system.seconds(1, 0, 64)
            return system.last[0][-1].inputs.link

    assert run_virtually(link()) == pytest.approx(2 * costs.link, rel=0.05)


def test_what_a_sequence_has_itself_is_no_part_of_what_others_have() -> None:
    """Three sequences that decode plainly: each has two others, of a row and a token a step."""
    costs = Costs(verify=lambda rows: 0.02, draft=lambda batch: 0.001, link=0.001)

    async def others() -> tuple[float, float]:
        async with virtual_system(costs, copying(right=1.0, found=0.0)) as system:
            await system.seconds(3, 0, 64)
            inputs = system.last[0][-8].inputs  # the last ones may be alone
            return inputs.other_rows, inputs.other_tokens

    assert run_virtually(others()) == pytest.approx((2, 2), abs=0.1)


class Asking:
    """One sequence that asks a drafter for blocks which are always right."""

    def __init__(self) -> None:
        costs = Costs(verify=lambda rows: 0.1, draft=lambda batch: PER_CANDIDATE, catch_up=CATCH_UP)
        self.log = Log(b"root", PROMPT, SECRET)
        self.link = VirtualDrafter(costs, steady(1.0), None)
        self.worker = Worker(Role.DRAFT, "draft", self.link, WorkerState.READY)
        tally = Tally(NO_COUNTERS, Journal("sequence", ()))
        stop = StopConditions(len(PROMPT), 1000)
        self._drafting = Drafting(SchedulerConfig("s", SECRET), GenerationRequest(PROMPT), stop, self.log, tally)
        self._drafting.attach(self.worker, "sequence")
        self._came: asyncio.Queue[DraftResult] = asyncio.Queue()

    async def open(self) -> None:
        await self.link.open(self._deliver, lambda cause: None)

    def commit(self, count: int) -> None:
        behind = len(self.log) - len(PROMPT)
        self.log.append([token(position) for position in range(behind, behind + count)])

    def ask(self, waits: bool) -> None:
        self._drafting.ask(DraftPlan(LENGTH), self._header, time.monotonic(), waits)

    async def block(self) -> None:
        body = (await self._came.get()).body
        assert isinstance(body, DraftBlock)
        self._drafting.arrived(time.monotonic(), body)

    async def round(self) -> None:
        """Its candidates are accepted, and one token more is committed."""
        self.ask(waits=True)
        await self.block()
        self.commit(LENGTH + 1)

    def _header(self, length: int) -> Header:
        return Header("sequence", Epoch(1, "owner"), length, self.log.digest_at(length))

    def _deliver(self, results: Sequence[DraftResult]) -> None:
        for result in results:
            self._came.put_nowait(result)


def test_a_block_behind_a_probe_that_was_given_up_does_not_tell_what_drafting_takes() -> None:
    """The drafter read first what was committed meanwhile, since it had not drafted that itself."""

    async def learned() -> DrafterModel:
        asking = Asking()
        await asking.open()
        await asking.round()
        asking.ask(waits=False)
        await asyncio.sleep(PER_CANDIDATE)  # it has begun
        asking.commit(LENGTH)  # plainly, no more than a block that was accepted would have been
        await asking.round()
        assert not asking.worker.drafter_model.known
        await asking.round()
        await asking.link.close()
        return asking.worker.drafter_model

    assert run_virtually(learned()).knots()(LENGTH) == pytest.approx(LENGTH * PER_CANDIDATE)


def test_a_plain_step_is_compared_with_the_forward_that_it_was_in() -> None:
    """Not with what forwards took while many others shared them: small batches follow large ones."""
    target, policy = TargetModel(), GoodputPolicy(Limits())
    policy.attach(target, DrafterModel())
    for _ in range(20):
        target.observe(TargetStep(0.080, 64, 6400, 64, 64))
    for _ in range(5):
        policy.observe(PlainStep(1, 0.0135, step_time=0.0130))
    assert target.plain_overhead.mean == pytest.approx(0.0005)


def test_a_few_askings_in_vain_say_little_of_the_next_one() -> None:
    """In texts of lines they are what comes before each match; a text that has nothing is known in twenty."""
    drafter = DrafterAcceptance()
    for proposed in [False, False, False, True, True] * 20:
        Acceptance(drafter).observe(BlockOutcome((Trial(0),)) if proposed else NOTHING_PROPOSED)
    usual, text = drafter.proposes, Acceptance(drafter)
    chances = []
    for _ in range(20):
        text.observe(NOTHING_PROPOSED)
        chances.append(text.proposes)
    assert chances[3] > 0.6 * usual
    assert chances[-1] < 0.4 * usual


def test_alone_nothing_is_believed_of_the_batch_before() -> None:
    """Rounds of large batches miss forwards, which one sequence cannot."""
    target, drafter = TargetModel(), DrafterModel()
    for overhead in [0.002] * 5 + [0.028] * 50:
        drafter.observe_wait(overhead, 0.012)
    for _ in range(50):
        target.observe(TargetStep(0.080, 64, 6400, 64, 64))
    together = drafter.waiting(target.shared)
    for _ in range(8):
        target.observe(TargetStep(0.012, 1, 100))
    assert together == pytest.approx(0.028, abs=0.003)
    assert drafter.waiting(target.shared) == pytest.approx(0.002)


def test_an_overhead_that_is_always_long_is_believed_alone_too() -> None:
    drafter = DrafterModel()
    for _ in range(10):
        drafter.observe_wait(0.028, 0.012)
    assert drafter.waiting(shared=False) == pytest.approx(0.028)
