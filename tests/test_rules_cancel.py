"""Kind 12: a cancel, whenever it comes, frees everything everywhere and harms no neighbour."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from scheduler.request import GenerationRequest, Tokens
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from specdec.messages import Release
from tools.cases import SAMPLED, check_all, expected, prompts
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.history import History, Terminal
from tools.scripted import ScriptedDrafter, WrongFrom, oracle
from tools.table_drafter import AgreeingLaw
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw(order=1000)


def request(prompt: tuple[int, ...] = (1, 2, 3), tokens: int = 40) -> GenerationRequest:
    return GenerationRequest(prompt, SAMPLED, max_tokens=tokens)


async def nothing_left(system: Deployment) -> None:
    await system.idle()
    for model in system.models:
        assert (model.blocks_used, model.open_sequences) == (0, 0)
        model.check_integrity()
    assert system.recorder.records == {}


async def read(system: Deployment, what: GenerationRequest, tokens: int, history: History, name: str) -> None:
    """Hangs up after `tokens` tokens: closes the stream in the middle of whatever goes on."""
    async with aclosing(system.scheduler.generate(what)) as events:
        async for event in events:
            history.request(name).see(event)
            if len(history.request(name).token_ids) >= tokens:
                break
    if not history.request(name).ends:
        history.request(name).end(Terminal.CANCELLED)


async def test_kind12_half_of_many_streams_hang_up_and_the_others_are_untouched() -> None:
    rng = random.Random(7)
    draft_model = TableModel(AgreeingLaw(LAW, 0.7))
    scripted = ScriptedDrafter(WrongFrom(2, 64), LawContinuation(LAW))
    drafters: list[Drafter] = [scripted, ModelDrafter(draft_model)]
    history = History()
    async with Deployment([TableModel(LAW), TableModel(LAW)], drafters, quick_config(5)) as system:
        readers = []
        for i, prompt in enumerate(prompts(60)):
            history.expect(str(i), expected(LAW, request(prompt)).token_ids)
            tokens = rng.randrange(0, 40) if i % 2 else 1000
            readers.append(read(system, request(prompt), tokens, history, str(i)))
        await asyncio.gather(*readers)
        assert history.violations() == []
        await nothing_left(system)
        assert (draft_model.blocks_used, draft_model.open_sequences) == (0, 0)
        assert scripted.known == set()
    ends = [history.request(str(i)).ends[0].terminal for i in range(60)]
    assert ends.count(Terminal.FINISHED) >= 30
    assert ends.count(Terminal.CANCELLED) >= 20


async def test_kind12_cancel_between_target_prefill_and_first_draft() -> None:
    """Number 69: the drafter is at work when the client goes away; it hears of it too."""
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    drafter.gate.clear()
    async with Deployment([TableModel(LAW)], [drafter]) as system:
        task = asyncio.create_task(system.generate(request()))
        await until(drafter.entered.is_set, "the drafter is drafting")
        task.cancel()
        await asyncio.wait([task])
        drafter.gate.set()
        await nothing_left(system)
        assert drafter.known == set()
        assert isinstance(system.drafts[0].items[-1].body, Release)
        await check_all(system, LAW, [request()])


async def test_kind12_cancel_while_the_target_is_inside_a_forward() -> None:
    model = TableModel(LAW)
    async with Deployment([model], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        model.gate.clear()
        task = asyncio.create_task(system.generate(request()))
        await until(model.entered.is_set, "the target is computing")
        task.cancel()
        await asyncio.wait([task])
        model.gate.set()
        await nothing_left(system)
        await check_all(system, LAW, [request()])


async def test_kind12_cancels_that_race_with_the_start_leave_no_capacity_behind() -> None:
    """Number 71."""
    config = quick_config()
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))], config) as system:
        for i in range(200):
            task = asyncio.create_task(system.generate(request()))
            for _ in range(i % 9):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await nothing_left(system)
        await check_all(system, LAW, [request(prompt, 5) for prompt in prompts(20)])


async def test_kind12_cancel_while_waiting_for_a_target() -> None:
    async with Deployment([TableModel(LAW)]) as system:
        system.targets[0].kill()
        await until(lambda: not system.scheduler.ready, "the target is known to be lost")
        task = asyncio.create_task(system.generate(request()))
        await until(lambda: system.scheduler.active_sequences() == 1, "admitted")
        task.cancel()
        await asyncio.wait([task])
        assert system.scheduler.active_sequences() == 0
        assert system.recorder.records == {}


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_kind12_cancel_during_a_failover(turns: int) -> None:
    models = [TableModel(LAW), TableModel(LAW)]
    for model in models:
        model.hold_at(60)
    async with Deployment(models, [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        seen: list[int] = []

        async def client() -> None:
            async with aclosing(system.scheduler.generate(request(tokens=200))) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        seen.extend(event.token_ids)

        task = asyncio.create_task(client())
        await until(lambda: len(seen) > 10, "it runs")
        serving = next(target for target in system.targets if target.worker.load().sequences)
        serving.kill()
        for model in models:
            model.gate.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        serving.replace(serving.worker)
        await nothing_left(system)
