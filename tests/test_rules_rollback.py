"""Kind 13: rejected candidates leave no trace, in no cache and in no later turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scheduler.request import GenerationRequest
from specdec.drafters.model import ModelDrafter
from specdec.params import SamplingParams
from target_worker.config import TargetConfig
from tools.cases import GREEDY, SAMPLED, check_all, total
from tools.continuations import LawContinuation, plain_output
from tools.deployment import Deployment, quick_config
from tools.process import SECRET
from tools.scripted import RandomTree, ScriptedDrafter, WrongFrom, oracle
from tools.table_drafter import AgreeingLaw
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw(order=1000)


async def test_kind13_a_thousand_rejections_and_the_next_turn_is_that_of_a_fresh_session() -> None:
    """Every position is the wrong one in turn; each turn's prompt is all that was said before."""
    model = TableModel(LAW, context_length=2048)
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    prompt: tuple[int, ...] = (1, 2, 3)
    rejections = 0
    async with Deployment([model], [drafter], quick_config(6)) as system:
        for turn in range(5):
            drafter.script = WrongFrom(turn, 64)
            request = GenerationRequest(prompt, SAMPLED, max_tokens=60 * (turn + 1))
            (answer,) = await check_all(system, LAW, [request], context_length=2048)
            rejections += total([answer]).num_drafts
            prompt = (*prompt, *answer.token_ids, 7)
        drafter.script = oracle
        (answer,) = await check_all(system, LAW, [GenerationRequest(prompt, SAMPLED, max_tokens=42)], 2048)
        await system.idle()
        model.check_integrity()
    assert rejections > 250
    assert total([answer]).acceptance_rate == 1.0


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=9)], ids=["greedy", "sampled"])
async def test_kind13_rejecting_the_last_candidate_is_handled_in_its_own_step(sampling: SamplingParams) -> None:
    """Number 76: K=1, anti draft."""
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(WrongFrom(0, 64), LawContinuation(LAW))]) as system:
        request = GenerationRequest((4, 2), sampling, max_tokens=40, draft_length=1)
        (answer,) = await check_all(system, LAW, [request])
    assert total([answer]).num_drafts == 39


async def test_kind13_what_is_recorded_is_what_was_delivered() -> None:
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(WrongFrom(1, 64), LawContinuation(LAW))]) as system:
        (answer,) = await check_all(system, LAW, [GenerationRequest((4, 2), SAMPLED, max_tokens=30)])
        record = system.recorder.last[answer.started.sequence_id]
    assert record.committed_length == 2 + len(answer.token_ids)
    assert list(record.token_ids) == [4, 2, *answer.token_ids]
    assert system.recorder.records == {}


async def test_kind13_strangers_in_a_small_cache_never_see_each_others_words() -> None:
    """Number 78: two tenants whose prompts differ in a canary at the front, hundreds of swaps in a pool of few blocks.

    The law looks back at everything, so one foreign token in the KV changes what is said.
    """
    model = TableModel(LAW, blocks_total=40, page=4)
    drafter = ScriptedDrafter(RandomTree(3, 64), LawContinuation(LAW))
    common = tuple(range(20, 40))
    requests = [
        GenerationRequest((canary, *common[: 5 + i % 15]), replace(SAMPLED, seed=i), max_tokens=8)
        for i in range(120)
        for canary in (1, 2)
    ]
    async with Deployment([model], [drafter], quick_config(3)) as system:
        for start in range(0, len(requests), 24):
            await check_all(system, LAW, requests[start : start + 24])
        await system.idle()
        model.check_integrity()
        assert system.targets[0].worker.load().prefix_hit_tokens > 0


async def test_kind13_an_aborted_prefill_is_never_taken_for_a_finished_one() -> None:
    """Number 79: cancelled in the middle of a chunked prefill; the same prompt then shares only what was written."""
    model = TableModel(LAW, delay=0.002)
    prompt = tuple(range(60)) * 4
    target_config = TargetConfig("t", SECRET, prefill_chunk=8)
    async with Deployment([model], target_config=target_config) as system:
        for _ in range(12):
            task = asyncio.create_task(system.generate(GenerationRequest(prompt, GREEDY, max_tokens=4)))
            seen = model.num_forwards
            await until(lambda seen=seen: model.num_forwards > seen, "a chunk is computed")  # type: ignore[misc]
            task.cancel()
            await asyncio.wait([task])
            await system.idle()
            model.check_integrity()
        model.delay = 0.0
        await check_all(system, LAW, [GenerationRequest(prompt, GREEDY, max_tokens=4)])


async def test_kind13_a_drafter_with_kv_recovers_after_every_rejection() -> None:
    """Number 75: the KV of a model drafter is rolled back to the log, so what it proposes next is what it would
    propose afresh."""
    drafter = ModelDrafter(TableModel(AgreeingLaw(LAW, 0.5)))
    async with Deployment([TableModel(LAW)], [drafter], quick_config(4)) as system:
        (answer,) = await check_all(system, LAW, [GenerationRequest((9, 9), SAMPLED, max_tokens=60)])
        bases = [item.header.base_length for item in system.targets[0].items]
    law = AgreeingLaw(LAW, 0.5)
    log = [9, 9, *answer.token_ids]
    hits = sum(
        plain_output(LAW, log[:base], SAMPLED, 1) == plain_output(law, log[:base], SAMPLED, 1)  # type: ignore[arg-type]
        for base in sorted(set(bases))
        if base < len(log) - 1
    )
    per_position = total([answer])
    assert answer.finished is not None
    assert answer.finished.speculation.num_accepted_tokens_per_position[0] == hits
    assert 0.2 < (per_position.acceptance_rate or 0.0) < 0.9
