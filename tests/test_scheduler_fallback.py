"""Drafting that does not pay, is late, fails or is absent costs time, never a token, and never much time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from scheduler.config import Policy, SchedulerConfig
from scheduler.request import GenerationRequest, Speculation
from specdec.candidates import CandidateTree
from specdec.drafter import DraftJob
from specdec.messages import DraftOpen, DraftResult, Refusal, RefusalReason, VerifyBlock
from specdec.params import SamplingParams
from tools.continuations import LawContinuation
from tools.deployment import Deployment, DraftSpec, quick_config
from tools.identities import draft_identity, tokenizer_json, words
from tools.scripted import ScriptedDrafter, WrongFrom, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw()
ANTI = WrongFrom(0, LAW.vocabulary_size)
REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=400)


def _drafter(script: object = oracle) -> ScriptedDrafter:
    return ScriptedDrafter(script, LawContinuation(LAW))  # type: ignore[arg-type]


def _threshold() -> SchedulerConfig:
    return quick_config(policy=Policy.THRESHOLD)


async def test_low_acceptance_switches_off_and_probes_find_the_way_back() -> None:
    drafter = _drafter(ANTI)
    async with Deployment([TableModel(LAW, delay=0.001)], [drafter], _threshold()) as deployment:
        bad = await deployment.generate(REQUEST)
        assert bad.finished is not None
        speculation = bad.finished.speculation
        assert speculation.fallbacks["low_acceptance"] >= 1
        assert speculation.num_plain_steps > 300
        assert speculation.num_drafts < 30
        turns_at = drafter.num_jobs + 8

        def turning(job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
            """The second request begins as badly as the first."""
            return (oracle if drafter.num_jobs > turns_at else ANTI)(job, continuation)

        drafter.script = turning
        recovered = (await deployment.generate(REQUEST)).finished
        assert recovered is not None
        assert recovered.speculation.num_accepted_tokens > 40
        assert bad.token_ids == (await deployment.plain(REQUEST)).token_ids


async def test_off_costs_no_message_per_token() -> None:
    """While speculation is off the drafter is sent nothing, and the target only a grant now and then."""
    async with Deployment([TableModel(LAW)], [_drafter()]) as deployment:
        await deployment.plain(REQUEST)
        assert deployment.drafts[0].items == []
        verifies = [item for item in deployment.targets[0].items if isinstance(item.body, VerifyBlock)]
        assert len(verifies) <= 400 // 32 + 1


async def test_the_switch_of_a_request_is_obeyed() -> None:
    async with Deployment([TableModel(LAW)], [_drafter(ANTI)], _threshold()) as deployment:
        on = (await deployment.generate(replace(REQUEST, speculation=Speculation.ON, draft_length=3))).finished
        assert on is not None
        assert on.speculation.num_drafts > 390
        off = (await deployment.generate(replace(REQUEST, speculation=Speculation.OFF))).finished
        assert off is not None
        assert off.speculation.num_drafts == 0


async def test_a_late_draft_is_not_waited_for_and_a_late_drafter_is_left_alone() -> None:
    drafter = _drafter()
    config = replace(quick_config(), draft_timeout=0.05, suspend_time=0.2)
    async with Deployment([TableModel(LAW, delay=0.001)], [drafter], config) as deployment:
        drafter.gate.clear()
        answer = await deployment.generate(REQUEST)
        assert answer.finished is not None
        assert answer.finished.speculation.fallbacks["late"] >= 1
        assert answer.finished.speculation.num_drafts == 0
        drafter.gate.set()
        assert answer.token_ids == (await deployment.plain(REQUEST)).token_ids


async def test_a_drafter_that_comes_back_is_used_again() -> None:
    drafter = _drafter()
    config = replace(quick_config(), draft_timeout=0.3, suspend_time=0.05)
    async with Deployment([TableModel(LAW, delay=0.002)], [drafter], config) as deployment:
        drafter.gate.clear()
        task = asyncio.create_task(deployment.generate(REQUEST))
        await until(drafter.entered.is_set, "a draft was asked for")
        await until(lambda: deployment.targets[0].worker.load().tokens > 20, "the target goes on without it")
        drafter.gate.set()
        answer = await task
        assert answer.finished is not None
        assert answer.finished.speculation.num_accepted_tokens > 100


async def test_no_drafter_is_plain_and_one_that_arrives_is_used() -> None:
    model = TableModel(LAW, delay=0.002)
    model.hold_at(60)
    async with Deployment([model]) as deployment:
        task = asyncio.create_task(deployment.generate(REQUEST))
        await until(lambda: any(len(s.token_ids) > 20 for s in deployment.scheduler.sequences()), "plain tokens")
        endpoint = deployment.add_draft(DraftSpec(_drafter()))
        deployment.scheduler.add_worker(endpoint.worker.identity.role, endpoint.address)
        await until(deployment.settled, "it is ready")
        model.gate.set()
        answer = await task
        assert answer.finished is not None
        assert answer.finished.speculation.mode == "mixed"
        assert answer.token_ids == (await deployment.plain(REQUEST)).token_ids


async def test_killed_drafter_another_takes_over_without_a_changed_token() -> None:
    drafters = [_drafter(), _drafter()]
    model = TableModel(LAW)
    model.hold_at(80)
    async with Deployment([model], drafters) as deployment:
        task = asyncio.create_task(deployment.generate(REQUEST))
        await until(lambda: any(d.num_jobs > 10 for d in drafters), "drafting")
        used = 0 if drafters[0].num_jobs else 1
        deployment.drafts[used].kill()
        model.gate.set()
        answer = await task
        assert answer.finished is not None
        assert answer.finished.speculation.fallbacks == {"failed": 1}
        assert drafters[1 - used].num_jobs > 10
        assert answer.token_ids == (await deployment.plain(REQUEST)).token_ids


async def test_misfitting_drafter_is_refused_whatever_the_start_order() -> None:
    vocabulary = [*words(5), "another", *words(64)[6:]]
    foreign = DraftSpec(_drafter(), draft_identity("foreign", vocabulary))
    fitting = DraftSpec(_drafter(), draft_identity("fitting", words(LAW.vocabulary_size)))
    async with Deployment([], [foreign, fitting]) as deployment:
        assert await deployment.state_of("draft-0") == "ready"  # nothing to compare with yet
        deployment.drafts[0].tokenizer_json = tokenizer_json(vocabulary)
        endpoint = deployment.add_target(TableModel(LAW))
        deployment.scheduler.add_worker(endpoint.worker.identity.role, endpoint.address)

        async def refused() -> bool:
            return await deployment.state_of("draft-0") == "refused"

        await until(refused, "the foreign drafter is refused")
        assert await deployment.state_of("draft-1") == "ready"
        view = next(v for v in await deployment.scheduler.workers() if v.address == "draft-0")
        assert "draft model table-draft" in view.detail
        assert "target model table" in view.detail
        assert view.detail.endswith("first differing id 5")
        await deployment.generate(replace(REQUEST, max_tokens=20))
        assert deployment.drafts[0].items == []
        assert any(isinstance(item.body, DraftOpen) for item in deployment.drafts[1].items)


async def test_a_drafter_that_lost_its_memory_is_opened_again() -> None:
    """A draft worker that answers `unknown sequence` is sent the log anew, and drafting goes on."""
    async with Deployment([TableModel(LAW)], [_drafter()]) as deployment:
        forgotten = 0

        def forget_once(results: list[DraftResult]) -> list[DraftResult]:
            nonlocal forgotten
            if forgotten or results[0].header.base_length < 30:
                return results
            forgotten += 1
            return [DraftResult(results[0].header, Refusal(RefusalReason.UNKNOWN_SEQUENCE, "planted"))]

        deployment.drafts[0].meddle = forget_once
        answer = await deployment.generate(REQUEST)
        assert answer.finished is not None
        assert answer.finished.speculation.num_plain_steps <= 1
        opens = [item for item in deployment.drafts[0].items if isinstance(item.body, DraftOpen)]
        assert len(opens) == 2
        assert answer.token_ids == (await deployment.plain(REQUEST)).token_ids


async def test_sixteen_requests_each_equal_their_solo_run() -> None:
    model = TableModel(LAW)
    model.gate.clear()
    async with Deployment([model], [_drafter(WrongFrom(2, LAW.vocabulary_size))]) as deployment:
        requests = [
            replace(REQUEST, token_ids=(1, i, 3), max_tokens=80, sampling=SamplingParams(temperature=0.5, seed=i))
            for i in range(16)
        ]
        running = [asyncio.create_task(deployment.generate(request)) for request in requests]
        await until(lambda: len(deployment.targets[0].items) >= 16, "the target has them all")
        model.gate.set()
        together = await asyncio.gather(*running)
        assert model.largest_batch >= 8
        for request, answer in zip(requests, together, strict=True):
            assert answer.token_ids == (await deployment.plain(request)).token_ids
