"""The kinds on SmolLM2, as a sample: the gateway tells what it tells plainly, and plainly what transformers says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.generation import ChatMessage, ChatPrompt, TextPrompt, UserRequest
from services.loaded_model import LoadedModel
from services.prompts import prompt_token_ids
from services.target_process import read_bundle
from services.tokenizer import Tokenizer
from services.worker_start import model_identity
from specdec.drafters.ngram import NgramDrafter
from specdec.grammars import Grammars
from specdec.messages import Role
from specdec.params import Grammar, GrammarKind
from specdec.vocabulary import VocabularyDigest
from tools.continuations import KnownContinuation
from tools.lab import Choice, Lab
from tools.lab_grid import Half
from tools.real_system import real_runner
from tools.scripted import FailingDrafter, RandomTree, ScriptedDrafter, WrongFrom, oracle
from tools.stock_model import StockModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 16
COPY = TextPrompt("The outrider left the camp before dawn. The outrider left the camp before dawn. The outrider")
CHAT = ChatPrompt((ChatMessage("user", "Answer with three emoji of animals, then count them in Czech and Chinese."),))
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def lab_of(folder: Path, dtype: str) -> Lab:
    runner = real_runner(folder, dtype)
    bundle = read_bundle(folder, folder.name)
    digest = VocabularyDigest.of(bundle.tokenizer_json)
    identity = model_identity("target", Role.TARGET, folder.name, runner, digest)
    return Lab(
        runner, bundle, identity, lambda: Grammars(bundle.tokenizer_json, runner.vocabulary_size, bundle.stop_token_ids)
    )


def requests_of(plain: str) -> list[UserRequest]:
    """plain: the text that continues COPY greedily."""
    greedy = UserRequest(COPY, max_tokens=TOKENS, temperature=0.0, seed=1, top_logprobs=3)
    drawn = UserRequest(CHAT, max_tokens=TOKENS, temperature=0.8, top_p=0.95, seed=7)
    return [
        greedy,
        replace(greedy, stop=(plain[9:12],)),
        replace(greedy, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
        replace(greedy, bad_words=("camp", "dawn"), logit_bias=((28, -5.0),), min_tokens=8),
        drawn,
        replace(drawn, min_p=0.05, typical_p=0.9, top_k=40, top_logprobs=2, n=2),
        replace(drawn, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), max_tokens=40),
    ]


async def _all(lab: Lab, drafter: Any, requests: Sequence[UserRequest], lengths: Sequence[int]) -> list[list[Choice]]:
    station = await lab.station(drafter)
    asked = [replace(request, draft_length=lengths[i % len(lengths)]) for i, request in enumerate(requests)]
    return list(await asyncio.gather(*(station.ask(request) for request in asked)))


async def test_kinds_answers_of_a_real_model_are_the_plain_ones(smollm2: Path) -> None:
    """Kinds 4, 5, 8, 9, 10 and 11."""
    lab = lab_of(smollm2, "bf16")
    async with lab:
        plain_text = (await lab.plainly(UserRequest(COPY, max_tokens=TOKENS, temperature=0.0))).text
        requests = requests_of(plain_text)
        plain = await asyncio.gather(*(lab.ask_plainly(request) for request in requests))
        known = KnownContinuation(await _logs(lab, requests, plain))
        size = lab.identity.vocabulary_size
        drafters = {
            "ngram": NgramDrafter(min_ngram=1),
            "oracle": ScriptedDrafter(oracle, known),
            "anti": ScriptedDrafter(WrongFrom(0, size), known),
            "half": ScriptedDrafter(Half(size), known),
            "tree": ScriptedDrafter(RandomTree(3, size), known),
            "failing": FailingDrafter(NgramDrafter()),
        }
        found = await asyncio.gather(*(_all(lab, drafter, requests, (4, 8, 1)) for drafter in drafters.values()))
    for name, answers in zip(drafters, found, strict=True):
        differences = [
            f"{name}, request {i}: {line}"
            for i, (ours, its) in enumerate(zip(answers, plain, strict=True))
            for mine, reference in zip(ours, its, strict=True)
            for line in mine.told.differences(reference.told)
        ]
        assert differences == []
    accepted = {
        name: sum(choice.summary.num_accepted_tokens for choices in answers for choice in choices)
        for name, answers in zip(drafters, found, strict=True)
    }
    assert min(accepted[name] for name in ("ngram", "oracle", "tree")) > 0
    assert accepted["anti"] == accepted["failing"] == 0
    stopped = plain[1][0].told
    assert (stopped.finish_reason, stopped.text) == ("stop", plain_text[: plain_text.index(plain_text[9:12])])
    jsonschema.validate(json.loads(plain[6][0].told.text), SCHEMA)


async def _logs(
    lab: Lab, requests: Sequence[UserRequest], plain: Sequence[Sequence[Choice]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts as the model reads them, and what it says to them plainly."""
    model = LoadedModel.load(lab.bundle, "")
    prompts = [await prompt_token_ids(request.prompt, model, 0) for request in requests]
    return [
        (prompt, choice.told.token_ids) for prompt, choices in zip(prompts, plain, strict=True) for choice in choices
    ]


async def test_kind08_plain_answers_of_a_real_model_are_those_of_transformers(smollm2: Path) -> None:
    """float32, greedy: the stock model under transformers' `generate` with its own processors."""
    lab = lab_of(smollm2, "fp32")
    tokenizer = Tokenizer(lab.bundle)
    prompt = tokenizer.encode(COPY.text)
    dawn = [tokenizer.encode(" dawn", add_special_tokens=False), tokenizer.encode("dawn", add_special_tokens=False)]
    cases: list[tuple[dict[str, Any], list[Any]]] = [
        ({}, []),
        ({"repetition_penalty": 1.25}, [RepetitionPenaltyLogitsProcessor(1.25)]),
        ({"bad_words": ("dawn",)}, [NoBadWordsLogitsProcessor(dawn)]),
        (
            {"logit_bias": ((prompt[1], -8.0),), "repetition_penalty": 1.5},
            [SequenceBiasLogitsProcessor([[[prompt[1]], -8.0]]), RepetitionPenaltyLogitsProcessor(1.5)],
        ),
    ]
    stock = StockModel(smollm2)
    async with lab:
        for fields, processors in cases:
            request = UserRequest(COPY, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **fields)
            told = await lab.plainly(request)
            right = stock.generate_with(prompt, TOKENS, LogitsProcessorList(processors))
            assert list(told.token_ids) == right, fields
            assert told.text == tokenizer.decode(right)
