"""Kind 8: every sampling parameter does what it does plainly, whatever was drafted; plainly, what transformers does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider import AsyncClient
from outrider.errors import InvalidRequest
from services.generation import TokenPrompt, UserRequest
from tools.continuations import KnownContinuation
from tools.lab import Lab, served
from tools.lab_grid import equal_everywhere
from tools.parameters import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    EDITS,
    TOKENS,
    WRITER,
    bad_word_ids,
    bare,
    parameter_requests,
    without_parameters,
)
from tools.reference import reference
from tools.scripted import ScriptedDrafter, oracle

LAW = WRITER.law()
LOOPING = WRITER.law(order=1, sharpness=4.0)
REQUESTS = parameter_requests()


async def test_kind08_every_parameter_equals_plain_decoding() -> None:
    """In shared batches, so that a row of one request that is edited for another (number 47) shows too."""
    async with Lab.of(WRITER, LAW) as lab:
        await equal_everywhere(lab, LAW, list(REQUESTS.values()), share=3)


async def test_kind08_every_parameter_matters() -> None:
    """Else the equality would hold for a server that drops it (number 49)."""
    async with Lab.of(WRITER, LAW) as lab:

        async def differs(request: UserRequest) -> bool:
            return (await lab.plainly(request)).text != (await lab.plainly(without_parameters(request))).text

        found = await asyncio.gather(*(differs(request) for request in REQUESTS.values()))
    assert [name for name, matters in zip(REQUESTS, found, strict=True) if not matters] == []


@pytest.mark.parametrize("law", [LAW, LOOPING], ids=["law", "looping"])
async def test_kind08_plain_decoding_is_that_of_transformers_processors(law: object) -> None:
    async with Lab.of(WRITER, law) as lab:  # type: ignore[arg-type]
        told = await asyncio.gather(*(lab.plainly(request) for request in REQUESTS.values()))
    for (name, request), ours in zip(REQUESTS.items(), told, strict=True):
        right = reference(law, request, TOKENS, bad_words=bad_word_ids(request))  # type: ignore[arg-type]
        assert ours.token_ids == right.token_ids, name
        assert ours.text == WRITER.decode(right.token_ids), name


async def test_kind08_penalties_end_a_loop_where_plain_decoding_does() -> None:
    """Numbers 49 and 51."""
    penalties = [
        {},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.05, "frequency_penalty": 0.3},
    ]
    requests = [
        UserRequest(TokenPrompt((97 + i,)), max_tokens=40, temperature=0.0, seed=1, ignore_eos=True, **fields)  # type: ignore[arg-type]
        for i, fields in enumerate(penalties)
    ]
    async with Lab.of(WRITER, LOOPING) as lab:
        grid = await equal_everywhere(lab, LOOPING, requests, share=2)
    loops = [len(set(choice.told.token_ids)) for (choice,) in grid.plain]
    assert loops[0] < 25, "the bare request must loop"
    assert min(loops[1:]) > loops[0]
    assert grid.figures["ngram"].num_accepted_tokens > 0


async def test_kind08_no_candidate_that_is_forbidden_is_accepted() -> None:
    """Numbers 46 and 47: an oracle that knows the answer without the edit, so that candidates are traps."""
    names = ("bias", "bad words", "allowed")
    requests = [(name, bare(100 + i, 1.1), EDITS[name]) for i, name in enumerate(names * 8)]
    async with Lab.of(WRITER, LAW) as lab:
        unedited = await asyncio.gather(*(lab.plainly(request) for _, request, _ in requests))
        prompts = [request.prompt.token_ids for _, request, _ in requests if isinstance(request.prompt, TokenPrompt)]
        known = KnownContinuation(zip(prompts, (one.token_ids for one in unedited), strict=True))
        station = await lab.station(ScriptedDrafter(oracle, known))
        edited = [replace(request, **fields, draft_length=4) for _, request, fields in requests]
        answers = await asyncio.gather(*(station.one(request) for request in edited))
        plain = await asyncio.gather(*(lab.plainly(request) for request in edited))
    assert [answer.told for answer in answers] == plain
    rejecting = sum(answer.summary.num_accepted_tokens < answer.summary.num_draft_tokens for answer in answers)
    assert rejecting > len(answers) / 2
    assert sum(answer.summary.num_accepted_tokens for answer in answers) > 0
    for (name, _, _), answer in zip(requests, answers, strict=True):
        assert not _forbidden(name, answer.told.token_ids), name


def _forbidden(name: str, token_ids: Sequence[int]) -> bool:
    if name == "bias":
        return any(token_id in token_ids for token_id, bias in BIAS if bias == -100.0)
    if name == "allowed":
        return not set(token_ids) <= set(ALLOWED)
    words = [tuple(word.encode()) for word in BAD_WORDS]
    return any(tuple(token_ids[i : i + len(word)]) == word for word in words for i in range(len(token_ids)))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("seed", {"seed": 1, "accept_rule": "rejection"}),
        ("seed", {"seed": 1, "accept_rule": "block"}),
        ("echo", {"echo": True, "top_logprobs": 0}),
        ("min_tokens", {"min_tokens": 1, "json_object": True}),
        ("bad_words", {"bad_words": ["a"], "json_object": True}),
        ("allowed_token_ids", {"allowed_token_ids": [1], "json_object": True}),
        ("ignore_eos", {"ignore_eos": True, "json_object": True}),
        ("allowed_token_ids", {"allowed_token_ids": [97], "bad_words": ["a"]}),
        ("logit_bias", {"logit_bias": {283: 1.0}}),
        ("logit_bias", {"logit_bias": {1: 101.0}}),
        ("typical_p", {"typical_p": 0.0}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -2.5}),
        ("n", {"n": 0}),
        ("top_logprobs", {"top_logprobs": 129}),
        ("stop", {"stop": [""]}),
        ("bad_words", {"bad_words": [""]}),
    ],
)
async def test_kind08_what_cannot_be_honoured_is_refused_by_name(field: str, options: dict[str, object]) -> None:
    """Never silently ignored."""
    async with Lab.of(WRITER, LAW) as lab, served(lab.plain) as address, AsyncClient(address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete("hello", max_tokens=4, **options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field in str(caught.value)
