"""Kind 14: a request beside many others is what it is alone. With it kind 15: also where there is too little room."""

from __future__ import annotations

import asyncio
import random

import pytest

from scheduler.errors import SequenceFailed
from scheduler.request import GenerationRequest, Speculation
from specdec.drafter import Drafter
from specdec.params import SamplingParams
from target_worker.config import TargetConfig
from tools.cases import check_all, prompts, total
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.process import SECRET
from tools.scripted import RandomTree, ScriptedDrafter
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel

LAW = TableLaw(order=1000)


def mixed(count: int) -> list[GenerationRequest]:
    """Lengths, draft lengths, temperatures, filters, stops and speculation all different."""
    rng = random.Random(3)
    return [
        GenerationRequest(
            prompt,
            SamplingParams(rng.choice([0.0, 0.7, 1.2]), rng.choice([0, 5]), rng.choice([1.0, 0.9]), 0.01, seed=i),
            max_tokens=rng.randint(1, 40),
            stop_token_ids=frozenset(rng.sample(range(64), rng.choice([0, 2]))),
            speculation=rng.choice(list(Speculation)),
            draft_length=rng.choice([None, 1, 3, 9]),
        )
        for i, prompt in enumerate(prompts(count))
    ]


async def test_kind14_thirty_two_mixed_requests_each_equal_their_solo_runs() -> None:
    """The reference is the law itself, so equal to it side by side and one by one is equal to each other."""
    drafters: list[Drafter] = [TableDrafter(LAW, 0.8), ScriptedDrafter(RandomTree(3, 64), LawContinuation(LAW))]
    async with Deployment([TableModel(LAW)], drafters, quick_config(5, width=2)) as system:
        together = await check_all(system, LAW, mixed(32))
        assert system.targets[0].worker.load().largest_batch >= 8
        for request, answer in zip(mixed(32), together, strict=True):
            assert (await system.generate(request)).token_ids == answer.token_ids


async def test_kind14_acceptance_does_not_depend_on_the_batch() -> None:
    """Number 82."""
    figures = []
    for batch in (1, 4, 16):
        async with Deployment([TableModel(LAW)], [TableDrafter(LAW, 0.8)]) as system:
            requests = [GenerationRequest(p, SamplingParams(0.8, seed=4), max_tokens=25) for p in prompts(16)]
            answers = []
            for start in range(0, 16, batch):
                answers += await check_all(system, LAW, requests[start : start + batch])
            figures.append(total(answers))
    assert figures[0] == figures[1] == figures[2]


async def test_kind14_prefill_beside_verify_changes_neither() -> None:
    """Long prompts arrive in chunks while others are in the middle of their rounds."""
    config = TargetConfig("t", SECRET, token_budget=24, prefill_chunk=7)
    async with Deployment([TableModel(LAW)], [TableDrafter(LAW, 0.8)], target_config=config) as system:
        long = [tuple((i * k + 5) % 64 for i in range(100 + k)) for k in range(1, 7)]
        short = [p for p in prompts(12) if len(p) < 12]
        requests = [GenerationRequest(p, SamplingParams(0.8, seed=4), max_tokens=20) for p in (*short, *long)]
        await check_all(system, LAW, requests)


@pytest.mark.parametrize("kind", list(FaultKind))
async def test_kind14_a_bad_row_ends_its_own_sequence_only(kind: FaultKind) -> None:
    model = TableModel(LAW, faults=[Fault(kind, marker=63, from_length=12)])
    async with Deployment([model], [TableDrafter(LAW, 0.8)]) as system:
        good = [GenerationRequest((i, 2, 3), SamplingParams(0.8, seed=4), max_tokens=30) for i in range(12)]
        bad = asyncio.create_task(system.generate(GenerationRequest((63, 2, 3), max_tokens=30)))
        await check_all(system, LAW, good)
        with pytest.raises(SequenceFailed):
            await bad
        await system.idle()
        model.check_integrity()


@pytest.mark.parametrize("speculation", [Speculation.ON, Speculation.OFF])
async def test_kind15_more_sequences_than_the_kv_holds_take_turns(speculation: Speculation) -> None:
    """Room for about 8 of 32: all are right, and all end."""
    model = TableModel(LAW, blocks_total=80, page=4)
    requests = [
        GenerationRequest(p[:20], SamplingParams(0.8, seed=4), max_tokens=20, speculation=speculation)
        for p in prompts(32)
    ]
    async with Deployment([model], [TableDrafter(LAW, 0.8)]) as system:
        await check_all(system, LAW, requests)
        await system.idle()
        model.check_integrity()
