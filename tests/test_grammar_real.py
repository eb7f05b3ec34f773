"""Grammars over a real vocabulary: SmolLM2 writes JSON that fits, whatever is drafted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from scheduler.request import GenerationRequest
from services.chat import ChatTemplate
from services.masks import mask_factory
from services.tokenizer import Tokenizer, load_bundle
from specdec.commit import FinishReason
from specdec.drafter import Drafter
from specdec.drafters.ngram import NgramDrafter
from specdec.messages import TokenizerBundle
from specdec.params import SamplingParams
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.continuations import KnownContinuation
from tools.grammar_system import SCHEMAS
from tools.grammar_vocabulary import schema
from tools.process import SECRET
from tools.real_system import RealTarget, real_runner
from tools.scripted import ScriptedDrafter, WrongFrom, oracle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAMES = ("flat", "enum", "array bounds", "pattern")


@pytest.fixture
def bundle(smollm2: Path) -> TokenizerBundle:
    return load_bundle(smollm2)


@pytest.fixture
async def target(smollm2: Path, bundle: TokenizerBundle) -> AsyncIterator[RealTarget]:
    runner = real_runner(smollm2, "bf16")
    target = RealTarget(runner)
    make_mask = mask_factory(bundle.tokenizer_json, runner.vocabulary_size, bundle.stop_token_ids)
    target.worker = TargetWorker(TargetConfig("target", SECRET), runner, target.worker.identity, make_mask)
    async with target:
        yield target


def _requests(bundle: TokenizerBundle) -> list[tuple[str, GenerationRequest]]:
    tokenizer = Tokenizer(bundle)
    template = ChatTemplate(bundle.chat_template or "", bundle.special_tokens)
    requests = []
    for seed, name in enumerate(NAMES):
        prompt = template.render([{"role": "user", "content": f"Answer in JSON: something {name}, please."}])
        sampling = SamplingParams(0.8, seed=seed, grammar=schema(SCHEMAS[name]))
        token_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
        stop = frozenset(bundle.stop_token_ids)
        requests.append((name, GenerationRequest(token_ids, sampling, max_tokens=120, stop_token_ids=stop)))
    return requests


async def test_real_answers_fit_their_schemas_and_equal_plain_ones(target: RealTarget, bundle: TokenizerBundle) -> None:
    requests = _requests(bundle)
    alone = await target.system()
    plain = await asyncio.gather(*(alone.plain(request) for _, request in requests))
    tokenizer = Tokenizer(bundle)
    for (name, _), answer in zip(requests, plain, strict=True):
        assert answer.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(answer.token_ids)), SCHEMAS[name])
    known = KnownContinuation((r.token_ids, a.token_ids) for (_, r), a in zip(requests, plain, strict=True))
    size = target.runner.vocabulary_size
    drafters: list[Drafter] = [
        ScriptedDrafter(oracle, known),
        ScriptedDrafter(WrongFrom(0, size), known),
        ScriptedDrafter(WrongFrom(2, size), known),
        NgramDrafter(),
    ]
    for drafter in drafters:
        system = await target.system(drafter)
        answers = await asyncio.gather(*(system.generate(request) for _, request in requests))
        assert [a.token_ids for a in answers] == [a.token_ids for a in plain], drafter.name


async def test_real_greedy_answer_under_a_grammar_equals_plain(target: RealTarget, bundle: TokenizerBundle) -> None:
    requests = [replace(r, sampling=replace(r.sampling, temperature=0.0), max_tokens=40) for _, r in _requests(bundle)]
    alone = await target.system()
    plain = [await alone.plain(request) for request in requests]
    known = KnownContinuation((r.token_ids, a.token_ids) for r, a in zip(requests, plain, strict=True))
    drafted = await target.system(ScriptedDrafter(oracle, known))
    answers = await asyncio.gather(*(drafted.generate(request) for request in requests))
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert all(a.finished and a.finished.speculation.num_accepted_tokens for a in answers)
