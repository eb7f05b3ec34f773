"""A target that is lost, frozen, full or confused costs time, never a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.errors import DeadlineExceeded, Overloaded, SequenceFailed, Unavailable
from scheduler.request import Finished, GenerationRequest, Tokens
from specdec.messages import Committed, Epoch, Refusal, RefusalReason, TargetItem, TargetResult
from specdec.params import SamplingParams
from target_worker.config import TargetConfig
from tools.continuations import LawContinuation
from tools.deployment import Answer, Deployment, quick_config
from tools.network import Endpoint
from tools.process import SECRET
from tools.scripted import ScriptedDrafter, oracle
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel
from tools.waiting import PATIENCE, until

REQUEST = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=60)
LAW = TableLaw()


def _oracle() -> ScriptedDrafter:
    return ScriptedDrafter(oracle, LawContinuation(LAW))


async def _reference() -> list[int]:
    async with Deployment([TableModel(LAW)]) as alone:
        return (await alone.plain(REQUEST)).token_ids


def _fault_at(target: Endpoint[TargetItem, TargetResult], length: int, fault: str, faults: list[str]) -> None:
    """Does `fault` to the target, if it is the first, when a result of it arrives that follows `length` tokens."""

    def meddle(results: list[TargetResult]) -> list[TargetResult]:
        if faults or not any(isinstance(r.body, Committed) and r.header.base_length >= length for r in results):
            return results
        faults.append(target.address)
        act: Callable[[], None] = getattr(target, fault)
        act()
        return results if fault == "freeze" else []  # which lets through what has arrived

    target.meddle = meddle


async def _with_fault_after(deployment: Deployment, tokens: int, fault: str) -> Answer:
    """Runs the request and does `fault` to the target that holds it when it tells what follows `tokens` tokens."""
    answer: Answer | None = None
    faults: list[str] = []
    for target in deployment.targets:
        _fault_at(target, len(REQUEST.token_ids) + tokens, fault, faults)
    async for event in deployment.scheduler.generate(REQUEST):
        if isinstance(event, Tokens):
            assert answer is not None
            assert event.position == len(answer.token_ids)
            answer.token_ids += event.token_ids
        elif isinstance(event, Finished):
            assert answer is not None
            assert answer.finished is None
            answer.finished = event
        else:
            answer = Answer(event)
    assert faults
    assert answer is not None
    assert answer.finished is not None
    return answer


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("fault", ["kill", "freeze", "cut"])
async def test_sequence_goes_on_elsewhere_with_the_same_tokens(fault: str, drafted: bool) -> None:
    config = replace(quick_config(), round_timeout=1.0) if fault == "freeze" else quick_config()
    drafts = [_oracle()] if drafted else []
    async with Deployment([TableModel(LAW), TableModel(LAW)], drafts, config) as deployment:
        answer = await _with_fault_after(deployment, 20, fault)
        assert answer.token_ids == await _reference()
        assert answer.finished is not None
        assert answer.finished.speculation.num_failovers == 1


async def test_results_of_a_woken_target_are_refused() -> None:
    config = replace(quick_config(), round_timeout=0.3)
    models = [TableModel(LAW), TableModel(LAW)]
    for model in models:
        model.hold_at(50)
    async with Deployment(models, config=config) as deployment:
        task = asyncio.create_task(_with_fault_after(deployment, 10, "freeze"))
        await until(lambda: any(s.epoch_number > 1 for s in deployment.scheduler.sequences()), "taken over")
        for target in deployment.targets:
            target.thaw()
        for model in models:
            model.gate.set()
        answer = await task
        assert answer.token_ids == await _reference()
        await until(lambda: deployment.scheduler.refused_results > 0, "late results were refused")
        await deployment.idle()


async def test_the_only_target_comes_back_and_the_sequence_goes_on() -> None:
    async with Deployment([TableModel(LAW)]) as deployment:
        task = asyncio.create_task(_with_fault_after(deployment, 20, "kill"))
        await until(lambda: not deployment.targets[0].reachable, "killed")
        fresh = deployment.new_target_worker(TableModel(LAW), "target-0")
        deployment.targets[0].replace(fresh)
        answer = await task
        assert answer.token_ids == await _reference()


async def test_no_target_left_ends_in_one_unavailable_error() -> None:
    config = replace(quick_config(), admission_timeout=0.3)
    async with Deployment([TableModel(LAW)], config=config) as deployment:
        with pytest.raises(Unavailable, match="no live target worker"):
            await _with_fault_after(deployment, 10, "kill")
        assert deployment.scheduler.active_sequences() == 0


async def test_a_held_epoch_of_another_owner_is_outbid() -> None:
    """A scheduler that lost its memory meets a worker that holds the sequence under a high epoch."""
    async with Deployment([TableModel(LAW)]) as deployment:
        refused = 0

        def refuse_first(results: list[TargetResult]) -> list[TargetResult]:
            nonlocal refused
            if refused:
                return results
            refused += 1
            refusal = Refusal(RefusalReason.EPOCH, "planted", Epoch(41, "another"))
            return [TargetResult(results[0].header, refusal)]

        deployment.targets[0].meddle = refuse_first
        answer = await deployment.generate(REQUEST)
        assert answer.token_ids == await _reference()
        opened = [item.header.epoch.number for item in deployment.targets[0].items]
        assert max(opened) > 41


async def test_a_lost_answer_is_told_again() -> None:
    """Results that vanish on the way leave a gap; the target tells them again, and none twice to the client."""
    config = replace(quick_config(), round_timeout=0.3)
    async with Deployment([TableModel(LAW)], [_oracle()], config) as deployment:
        dropped = 0

        def drop_one(results: list[TargetResult]) -> list[TargetResult]:
            nonlocal dropped
            for result in results:
                if isinstance(result.body, Committed) and result.header.base_length > 20 and not dropped:
                    dropped += 1
                    return []
            return results

        deployment.targets[0].meddle = drop_one
        answer = await deployment.generate(REQUEST)
        assert dropped == 1
        assert answer.token_ids == await _reference()


async def test_repeated_answers_are_not_streamed_twice() -> None:
    async with Deployment([TableModel(LAW)], [_oracle()]) as deployment:
        deployment.targets[0].meddle = lambda results: [*results, *results]
        answer = await deployment.generate(REQUEST)
        assert answer.token_ids == await _reference()


async def test_a_full_target_sends_its_sequences_elsewhere_and_a_full_deployment_refuses() -> None:
    config = replace(quick_config(), admission_timeout=0.3)
    target_config = TargetConfig("target", SECRET, max_sequences=1)
    models = [TableModel(LAW, delay=0.005), TableModel(LAW, delay=0.005)]
    async with Deployment(models, config=config, target_config=target_config) as deployment:
        requests = [replace(REQUEST, token_ids=(1, 2, i), max_tokens=400) for i in range(3)]
        ends = await asyncio.gather(*(deployment.generate(r) for r in requests), return_exceptions=True)
        assert sum(isinstance(end, Overloaded) for end in ends) == 1
        assert sum(isinstance(end, Answer) for end in ends) == 2


@pytest.mark.parametrize("kind", list(FaultKind))
async def test_one_bad_row_ends_its_own_request_only(kind: FaultKind) -> None:
    model = TableModel(LAW, faults=[Fault(kind, marker=9, from_length=30)])
    async with Deployment([model], [_oracle()]) as deployment:
        bad = replace(REQUEST, token_ids=(9, 2, 3))
        ends = await asyncio.gather(
            deployment.generate(bad),
            *(deployment.generate(replace(REQUEST, token_ids=(1, 2, i))) for i in range(8)),
            return_exceptions=True,
        )
        assert isinstance(ends[0], SequenceFailed)
        for i, end in enumerate(ends[1:]):
            assert isinstance(end, Answer)
            assert end.token_ids == (await deployment.plain(replace(REQUEST, token_ids=(1, 2, i)))).token_ids
        await deployment.idle()


async def test_a_deadline_ends_the_request_and_frees_everything() -> None:
    model = TableModel(LAW)
    model.hold_at(40)
    async with Deployment([model], [_oracle()]) as deployment:
        with pytest.raises(DeadlineExceeded):
            await deployment.generate(replace(REQUEST, timeout=0.3))
        model.gate.set()
        await deployment.idle()


async def test_closing_the_scheduler_ends_what_runs_with_one_error() -> None:
    model = TableModel(LAW)
    model.hold_at(40)
    async with Deployment([model], [_oracle()]) as deployment:
        task = asyncio.create_task(deployment.generate(REQUEST))
        await until(lambda: any(len(s.token_ids) > 10 for s in deployment.scheduler.sequences()), "tokens came")
        await deployment.scheduler.close()
        with pytest.raises(Unavailable, match="has ended"):
            await asyncio.wait_for(task, PATIENCE)
        model.gate.set()
