"""The n choices of a request: side by side, each as if it were asked alone, and all ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from scheduler.errors import Overloaded, SequenceFailed
from services.choices import side_by_side
from services.gateway import Gateway
from services.generation import ChoiceStarted, TextPrompt, TextTokens, TokenPrompt, UserRequest
from specdec.params import SEED_LIMIT
from specdec.seeds import choice_seed
from tools.deployment import Deployment, quick_config
from tools.letters import Bundled, ask, ask_all, letters_bundle
from tools.scripted_scheduler import ScriptedScheduler
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw(order=2)
REQUEST = UserRequest(TokenPrompt((3, 1, 4, 1, 5)), max_tokens=30, temperature=1.0, seed=9, n=3, top_logprobs=1)


def test_seeds_of_choices_are_those_of_the_request_and_far_from_one_another() -> None:
    assert choice_seed(77, 0) == 77
    seeds = [choice_seed(seed, index) for seed in (0, 1, 77, SEED_LIMIT - 1) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)


@pytest.fixture
async def system() -> AsyncIterator[Deployment]:
    async with Deployment([TableModel(LAW)], [TableDrafter(LAW, 0.8)], quick_config(5)) as system:
        yield system
        await system.idle()


async def test_choices_differ_are_reproducible_and_are_the_answers_to_their_own_seeds(system: Deployment) -> None:
    gateway = Gateway(Bundled(system.scheduler, letters_bundle()))
    first, again = await ask_all(gateway, REQUEST), await ask_all(gateway, REQUEST)
    assert [answer.told for answer in first] == [answer.told for answer in again]
    assert len({tuple(answer.token_ids) for answer in first}) == 3
    for index, answer in enumerate(first):
        alone = await ask(gateway, replace(REQUEST, n=1, seed=answer.started.seed))
        assert alone.told == answer.told
        assert answer.started.seed == choice_seed(9, index)
        assert len(answer.token_ids) == len(answer.logprobs) == 30


async def test_choices_stop_at_their_own_texts(system: Deployment) -> None:
    gateway = Gateway(Bundled(system.scheduler, letters_bundle()))
    answers = await ask_all(gateway, replace(REQUEST, n=6, stop=("ab", "c b"), max_tokens=60))
    assert len({len(answer.token_ids) for answer in answers}) > 1
    for answer in answers:
        alone = await ask(
            gateway, replace(REQUEST, n=None, seed=answer.started.seed, stop=("ab", "c b"), max_tokens=60)
        )
        assert alone.told == answer.told


async def test_choices_without_a_seed_have_different_ones() -> None:
    scheduler = ScriptedScheduler()
    await ask_all(Gateway(scheduler), UserRequest(TextPrompt("hi"), n=8))
    assert len({request.sampling.seed for request in scheduler.requests}) == 8


async def test_choices_run_at_the_same_time() -> None:
    scheduler = ScriptedScheduler()
    scheduler.gate.clear()
    task = asyncio.create_task(ask_all(Gateway(scheduler), UserRequest(TextPrompt("hi"), n=5)))
    await until(lambda: scheduler.running == 5, "all run")
    scheduler.gate.set()
    assert [answer.text for answer in await task] == ["hello"] * 5


async def test_a_choice_that_fails_ends_all_with_one_error() -> None:
    scheduler = ScriptedScheduler(fail_after=2, error=Overloaded("no room"))
    seen: list[object] = []
    with pytest.raises(Overloaded, match="no room"):
        async for event in Gateway(scheduler).generate(UserRequest(TextPrompt("hi"), n=4)):
            seen.append(event)
    assert scheduler.running == 0
    assert {type(event) for event in seen} == {ChoiceStarted, TextTokens}


async def test_a_choice_that_is_refused_at_admission_cancels_the_others(system: Deployment) -> None:
    config = replace(quick_config(5), max_sequences=2)
    async with Deployment([TableModel(LAW)], [], config) as small:
        with pytest.raises(Overloaded):
            await ask_all(Gateway(Bundled(small.scheduler, letters_bundle())), REQUEST)
        await small.idle()


async def test_leaving_early_cancels_every_choice(system: Deployment) -> None:
    gateway = Gateway(Bundled(system.scheduler, letters_bundle()))
    async with aclosing(gateway.generate(replace(REQUEST, n=8, max_tokens=400))) as events:
        async for event in events:
            if isinstance(event, TextTokens):
                break
        assert system.scheduler.active_sequences() == 8
    assert system.scheduler.active_sequences() == 0


async def test_a_cancelled_listener_cancels_every_choice(system: Deployment) -> None:
    gateway = Gateway(Bundled(system.scheduler, letters_bundle()))
    task = asyncio.create_task(ask_all(gateway, replace(REQUEST, n=4, max_tokens=400)))
    await until(lambda: system.scheduler.active_sequences() == 4, "all run")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert system.scheduler.active_sequences() == 0


async def test_a_slow_listener_holds_the_choices_up() -> None:
    told = [0, 0]

    async def stream(index: int) -> AsyncGenerator[int, None]:
        for number in range(100):
            told[index] += 1
            yield number

    async with aclosing(side_by_side([stream(0), stream(1)])) as events:
        await anext(events)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(told) <= 6  # one is taken, two wait, and each stream holds one or two
        assert len([event async for event in events]) == 199


async def test_an_end_without_its_last_event_is_an_error_for_all() -> None:
    with pytest.raises(SequenceFailed):
        await ask_all(Gateway(ScriptedScheduler(unending=True)), UserRequest(TextPrompt("hi"), n=2))
