"""SmolLM2 drawn at temperature 0.8, top-p 0.9: the ids are a function of request, seed and target alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.request import GenerationRequest
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.engine.loading import build_runner
from specdec.engine.runner import ModelRunner
from specdec.messages import Committed
from specdec.params import SamplingParams
from tools.cases import GREEDY
from tools.continuations import KnownContinuation
from tools.deployment import Answer, SystemUnderTest
from tools.history import History
from tools.real_grid import Half
from tools.real_prompts import own_prompts
from tools.real_system import RealSystem, RealTarget, real_runner
from tools.scripted import RandomTree, ScriptedDrafter, WrongFrom, oracle

pytestmark = pytest.mark.timeout(300)

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=20_260_731)


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> ModelRunner:
    return real_runner(smollm2, "bf16")


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> dict[str, tuple[int, ...]]:
    return {prompt.name: prompt.token_ids for prompt in own_prompts(smollm2)}


def _twin(runner: ModelRunner) -> ModelDrafter:
    """The target's own weights as drafter, over KV of its own."""
    return ModelDrafter(build_runner(runner.model, name=runner.name, kv_memory=2**28, max_context=1024))


async def _check_variants(target: RealTarget, request: GenerationRequest) -> None:
    """The same request with other drafters and draft lengths."""
    alone = await (await target.system()).plain(request)
    known = KnownContinuation([(request.token_ids, alone.token_ids)])
    size = target.runner.vocabulary_size
    variants: list[tuple[Drafter, int]] = [
        (_twin(target.runner), 4),
        (_twin(target.runner), 1),
        (NgramDrafter(min_ngram=1), 8),
        (ScriptedDrafter(oracle, known), 8),
        (ScriptedDrafter(Half(size), known), 4),
        (ScriptedDrafter(WrongFrom(0, size), known), 1),
        (ScriptedDrafter(RandomTree(3, size), known), 5),
    ]
    systems = [await target.system(drafter) for drafter, _ in variants]
    for (drafter, length), system in zip(variants, systems, strict=True):
        answer = await system.generate(replace(request, draft_length=length))
        assert answer.token_ids == alone.token_ids, f"{drafter.name}, draft length {length}"
        assert answer.finished is not None
        assert answer.finished.speculation.num_drafts > 0
        if isinstance(drafter, ModelDrafter):
            # Target and drafter share law and noise, so the drafter knows every draw.
            assert answer.finished.speculation.acceptance_rate == 1.0


async def test_no_drafter_and_no_draft_length_changes_a_draw(
    runner: ModelRunner, prompts: dict[str, tuple[int, ...]]
) -> None:
    async with RealTarget(runner) as target:
        await _check_variants(target, GenerationRequest(prompts["list"], SAMPLED, max_tokens=16))


async def test_another_seed_is_another_text(runner: ModelRunner, prompts: dict[str, tuple[int, ...]]) -> None:
    """Else the tests of this file would hold for a target that ignores the noise."""
    request = GenerationRequest(prompts["list"], SAMPLED, max_tokens=12)
    async with RealTarget(runner) as target:
        system = await target.system()
        seeds = [replace(request, sampling=replace(SAMPLED, seed=seed)) for seed in range(6)]
        answers = await asyncio.gather(*(system.plain(request) for request in seeds))
    assert len({tuple(answer.token_ids) for answer in answers}) == 6


async def test_a_batch_of_strangers_changes_no_draw(runner: ModelRunner, prompts: dict[str, tuple[int, ...]]) -> None:
    """Half of the strangers speculate, with another drafter."""
    request = GenerationRequest(prompts["german"], SAMPLED, max_tokens=16)
    async with RealTarget(runner) as target:
        strange, plain = await target.system(_twin(runner)), await target.system()
        alone = await plain.plain(request)
        known = KnownContinuation([(request.token_ids, alone.token_ids)])
        ours = await target.system(ScriptedDrafter(Half(runner.vocabulary_size), known))
        strangers = [
            (strange if i % 2 else plain).generate(
                GenerationRequest(token_ids, replace(SAMPLED, seed=seed), max_tokens=16)
            )
            for i, (seed, token_ids) in enumerate((seed, p) for seed in (1, 2) for p in prompts.values())
        ]
        drafted, undrafted, *_ = await asyncio.gather(ours.generate(request), plain.plain(request), *strangers)
        assert drafted.token_ids == alone.token_ids
        assert undrafted.token_ids == alone.token_ids
        for system, answer in ((ours, drafted), (plain, undrafted)):
            assert max(_batch_sizes(system, answer)) >= 8


def _batch_sizes(system: RealSystem, answer: Answer) -> list[int]:
    """Sequences in each forward that decided tokens of this answer."""
    return [
        result.body.batch_size
        for result in system.target.results
        if result.header.sequence_id == answer.started.sequence_id and isinstance(result.body, Committed)
    ]


async def test_sixteen_at_once_say_what_each_says_alone(
    runner: ModelRunner, prompts: dict[str, tuple[int, ...]]
) -> None:
    """Eight greedy and eight drawn; positions contiguous and one terminal event each."""
    requests = [
        GenerationRequest(token_ids, sampling, max_tokens=8)
        for token_ids in prompts.values()
        for sampling in (GREEDY, SAMPLED)
    ]
    history = History()
    async with RealTarget(runner) as target:
        system = await target.system(NgramDrafter(min_ngram=1))
        for i, request in enumerate(requests):
            alone = await _alone(system, request)
            history.expect(str(i), alone.token_ids)
        answers = await asyncio.gather(
            *(system.generate(request, history.request(str(i))) for i, request in enumerate(requests))
        )
        assert max(size for answer in answers for size in _batch_sizes(system, answer)) >= 8
    assert len(answers) == 16
    assert history.violations() == []
    assert sum(answer.finished.speculation.num_drafts for answer in answers if answer.finished) > 0


async def _alone(system: SystemUnderTest, request: GenerationRequest) -> Answer:
    answer = await system.plain(request)
    assert system.scheduler.active_sequences() == 0
    return answer
