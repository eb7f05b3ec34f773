"""A target holds its next forward back for blocks that are about to come, so that a batch stays in step: never for
long, and only where a forward of all gains by it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest

from scheduler.config import Policy
from scheduler.request import GenerationRequest
from specdec.candidates import EMPTY, CandidateTree
from specdec.law import Law
from specdec.log import Log
from specdec.messages import Committed, Epoch, Grant, Header, TargetItem, TargetOpen, TargetResult, VerifyBlock
from specdec.params import SamplingParams, StopConditions
from target_worker.batch import Work, make_work
from target_worker.config import TargetConfig
from target_worker.gathering import Gathering
from target_worker.sequence import TargetSequence
from target_worker.worker import TargetWorker
from tools.identities import target_identity
from tools.process import SECRET
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.virtual_system import GOODPUT, virtual_system
from tools.virtual_text import steady
from tools.virtual_time import run_virtually
from tools.virtual_workers import Costs

FORWARD, ANSWER = 0.030, 0.004
"""Seconds of any forward, and from a commit until the next block is here."""
WAITS, GOES_ON = Grant(100, patience=0.5), Grant(100)


def sequence(name: str, grant: Grant, committed_at: float, pending: bool = False) -> TargetSequence:
    """One that has committed a token."""
    log = Log(name.encode(), (1, 2))
    law = Law(SamplingParams(temperature=0.0), StopConditions(1, 200), (1,))
    made = TargetSequence(name, 1, Epoch(1, "o"), log, 1, law, grant, committed_at)
    made.pending = CandidateTree.chain((3, 4)) if pending else None
    return made


def work(sequences: Sequence[TargetSequence], now: float) -> list[Work]:
    return [made for each in sequences if (made := make_work(each, 1, 64, now)) is not None]


def experienced(answer: float = ANSWER) -> Gathering:
    """Knows what forwards take and how soon blocks come."""
    gathering = Gathering()
    for i in range(5):
        gathering.answered(sequence(f"{i}", WAITS, 10.0), 10.0 + answer)
        gathering.forwarded(4, FORWARD)
        gathering.forwarded(16, FORWARD)
    return gathering


def hold(gathering: Gathering, sequences: Sequence[TargetSequence], now: float) -> float:
    return gathering.hold(work(sequences, now), sequences, now)


def test_a_forward_waits_for_a_block_twice_as_long_as_it_usually_takes() -> None:
    both = sequence("ready", WAITS, 20.0, pending=True), sequence("waits", WAITS, 20.0)
    assert hold(experienced(), both, 20.001) == pytest.approx(2 * ANSWER - 0.001)
    assert hold(experienced(), both, 20.0 + 2.1 * ANSWER) == 0.0


@pytest.mark.parametrize(
    "others",
    [
        [],
        [sequence("goes on", GOES_ON, 20.0)],
        [sequence("late", WAITS, 19.9)],
        [replace(sequence("just opened", WAITS, 20.0), opened_length=2)],
    ],
    ids=["none", "goes on", "late", "just opened"],
)
def test_it_waits_for_nobody_of_whom_no_block_is_expected(others: list[TargetSequence]) -> None:
    assert hold(experienced(), [sequence("ready", WAITS, 20.0, pending=True), *others], 20.001) == 0.0


def test_it_does_not_wait_before_it_knows_how_soon_blocks_come_nor_where_that_takes_longer_than_it_wins() -> None:
    both = sequence("ready", WAITS, 20.0, pending=True), sequence("waits", WAITS, 20.0)
    assert hold(Gathering(), both, 20.0) == 0.0
    assert hold(experienced(answer=1.2 * FORWARD), both, 20.0) == 0.0


def test_many_that_go_on_by_themselves_are_not_held_up_for_one() -> None:
    many = [sequence(f"{i}", GOES_ON, 20.0) for i in range(15)]
    assert hold(experienced(), [*many, sequence("waits", WAITS, 20.0)], 20.0) == 0.0
    half = [sequence(f"waits {i}", WAITS, 20.0) for i in range(15)]
    assert hold(experienced(), [*many, *half], 20.0) > 0.0


@pytest.fixture
def clock() -> Iterator[mock.Mock]:
    with mock.patch.object(time, "monotonic", return_value=50.0) as patched:
        yield patched


def test_a_worker_begins_a_forward_that_was_held_back_when_its_time_is_over_or_the_block_is_here(
    clock: mock.Mock,
) -> None:
    """Two sequences, of which one has its next block and the other does not."""
    model = TableModel(TableLaw())
    worker = TargetWorker(TargetConfig("target", SECRET), model, target_identity("target", model.vocabulary_size, 512))
    results: list[TargetResult] = []
    session = worker.attach(results.extend)
    logs = {name: Log(name.encode(), (1, 2), SECRET) for name in ("a", "b")}

    def header(name: str) -> Header:
        return Header(name, Epoch(1, "o"), len(logs[name]), logs[name].digest)

    def send(name: str, body: TargetOpen | VerifyBlock) -> None:
        worker.submit(session, [TargetItem(header(name), body)])

    def turn() -> list[str]:
        """Who committed."""
        outgoing: defaultdict[int, list[TargetResult]] = defaultdict(list)
        worker._turn(outgoing)
        committed = [r for r in outgoing[session] if isinstance(r.body, Committed)]
        for result in committed:
            assert isinstance(result.body, Committed)
            logs[result.header.sequence_id].append(result.body.token_ids)
        return sorted(result.header.sequence_id for result in committed)

    for name, log in logs.items():
        send(name, TargetOpen((1, 2), SamplingParams(temperature=0.0), StopConditions(2, 200), Grant(3), log.root))
    turn()
    while min(len(log) for log in logs.values()) < 3:
        turn()
    block = VerifyBlock(EMPTY, WAITS)
    for _ in range(5):  # learns how soon blocks come, and what forwards take
        worker._gathering.forwarded(2, FORWARD)
        send("a", block)
        send("b", block)
        assert turn() == ["a", "b"]
        clock.return_value += ANSWER
    send("a", block)
    assert turn() == []
    assert worker._idle_for() == pytest.approx(ANSWER)
    send("b", block)
    assert turn() == ["a", "b"]
    send("a", block)
    assert turn() == []
    clock.return_value += 2.5 * ANSWER
    assert turn() == ["a"]


@pytest.mark.parametrize("batch", [4, 16])
def test_a_batch_whose_answers_began_at_different_times_gets_into_step(batch: int) -> None:
    """Without it each sequence misses the forward of the others, and runs in every second one."""
    costs = Costs(verify=lambda rows: 0.028 + 0.0009 * rows, draft=lambda batch: 0.0003, link=0.001)
    config = replace(GOODPUT, policy=Policy.FIXED, draft_length=3)

    async def steps() -> list[int]:
        async with virtual_system(costs, steady(0.5), config) as system:

            async def answer(number: int) -> None:
                await asyncio.sleep(0.013 * number)
                request = GenerationRequest((number, 1, 2), SamplingParams(temperature=0.0), max_tokens=100)
                await system.generate(request)

            await asyncio.gather(*(answer(number) for number in range(batch)))
            return [count for count, _ in system.target.steps]

    counts = run_virtually(steps())
    middle = counts[len(counts) // 4 : len(counts) // 2]
    assert sum(middle) / len(middle) >= 0.9 * batch
