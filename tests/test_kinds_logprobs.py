"""Kind 9: logprobs are those of plain decoding, and plainly those of the law that transformers' processors give."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest
import torch

from outrider import AsyncClient
from services.generation import UserRequest
from specdec.params import LogprobsOf
from tools.lab import LOGPROB_TOLERANCE, Lab, Told, read, served
from tools.lab_grid import equal_everywhere
from tools.parameters import ALL, FILTERS, TOKENS, WRITER, bad_word_ids, bare
from tools.reference import reference

LAW = WRITER.law()


def logprob_requests() -> list[UserRequest]:
    """Both laws; none, one and twenty of the likeliest; greedy, drawn, hot, filtered and with every edit."""
    laws = list(LogprobsOf)
    requests = [
        replace(bare(300 + 10 * i + j, temperature), top_logprobs=top, logprobs_of=law)
        for i, law in enumerate(laws)
        for j, (temperature, top) in enumerate([(0.0, 20), (0.8, 0), (0.8, 1), (2.0, 20)])
    ]
    for i, law in enumerate(laws):
        requests.append(replace(bare(330 + i, 1.1), top_logprobs=20, logprobs_of=law, **FILTERS["filters"]))
        requests.append(replace(bare(340 + i, 1.1), top_logprobs=5, logprobs_of=law, **ALL))
        requests.append(replace(bare(350 + i, 0.0), top_logprobs=5, logprobs_of=law, **ALL))
    return requests


REQUESTS = logprob_requests()


async def test_kind09_logprobs_equal_plain_decodings_for_every_proposer_and_in_fallback() -> None:
    """Numbers 52, 56 and 57: with neighbours that ask for none, and with several choices."""
    neighbours = [bare(360 + i, 0.8) for i in range(4)]
    choices = replace(bare(370, 0.9), n=2, top_logprobs=3)
    async with Lab.of(WRITER, LAW) as lab:
        grid = await equal_everywhere(lab, LAW, [*REQUESTS, *neighbours, choices], share=3)
    for request, told in zip(REQUESTS, grid.plain, strict=False):
        assert all(len(choice.told.logprobs) == TOKENS for choice in told), request
    assert all(choice.told.logprobs == () for told in grid.plain[len(REQUESTS) : -1] for choice in told)
    assert [len(choice.told.logprobs) for choice in grid.plain[-1]] == [TOKENS, TOKENS]


async def test_kind09_plain_logprobs_are_those_of_the_model_and_of_transformers_processors() -> None:
    """Numbers 52 and 54: the raw ones know of no temperature, filter or penalty."""
    async with Lab.of(WRITER, LAW) as lab:
        told = await asyncio.gather(*(lab.plainly(request) for request in REQUESTS))
    for request, ours in zip(REQUESTS, told, strict=True):
        right = reference(LAW, request, TOKENS, bad_words=bad_word_ids(request))
        assert ours.token_ids == right.token_ids
        for i, row in enumerate(right.logprobs):
            _check_row(ours, i, row, request.top_logprobs or 0)
    assert {len(one.top) for ours in told for one in ours.logprobs} >= {0, 1, 20}


def _check_row(told: Told, position: int, row: torch.Tensor, count: int) -> None:
    one = told.logprobs[position]
    assert abs(one.logprob - float(row[told.token_ids[position]])) < LOGPROB_TOLERANCE
    finite = int((row > -torch.inf).sum())
    assert len(one.top) == min(count, finite)
    values = [value for _, value in one.top]
    assert values == sorted(values, reverse=True)
    highest = row.topk(len(values)).values.tolist()
    assert all(abs(ours - its) < LOGPROB_TOLERANCE for ours, its in zip(values, highest, strict=True))
    assert all(abs(value - float(row[token_id])) < LOGPROB_TOLERANCE for token_id, value in one.top)


async def test_kind09_raw_logprobs_do_not_depend_on_the_parameters() -> None:
    """Number 54, by the same text under another law: the only allowed token at each step is the bare one's."""
    base = replace(bare(380, 0.0), top_logprobs=20, max_tokens=1)
    edited = [
        replace(base, temperature=temperature, **fields)
        for temperature in (0.0, 2.0)
        for fields in ({}, {"logit_bias": ((97, 50.0),)}, {"repetition_penalty": 3.0}, {"top_k": 1})
    ]
    async with Lab.of(WRITER, LAW) as lab:
        told = [await lab.plainly(replace(request, seed=1)) for request in edited]
    assert len({one.token_ids for one in told}) > 1
    tops = {tuple((token_id, round(value, 5)) for token_id, value in one.logprobs[0].top) for one in told}
    assert len(tops) == 1


@pytest.mark.parametrize("of", ["raw", "processed"])
async def test_kind09_grpc_tells_finite_numbers(of: str) -> None:
    """What cannot be drawn is left out, not told as -inf."""
    request = replace(bare(390, 1.1), top_logprobs=20, logprobs_of=LogprobsOf(of), top_k=3)
    async with Lab.of(WRITER, LAW) as lab, served(lab.plain) as address, AsyncClient(address) as client:
        plain = await lab.plainly(request)
        prompt = request.prompt.token_ids  # type: ignore[union-attr]
        events = [
            event
            async for event in client.generate(
                token_ids=prompt,
                max_tokens=TOKENS,
                temperature=1.1,
                seed=390,
                top_k=3,
                ignore_eos=True,
                top_logprobs=20,
                logprobs_of=of,  # type: ignore[arg-type]
            )
        ]
    (choice,) = read(events)
    assert choice.told.differences(plain) == []
    numbers = [value for one in choice.told.logprobs for value in (one.logprob, *dict(one.top).values())]
    json.dumps(numbers, allow_nan=False)
    assert all(math.isfinite(number) and number <= 0.0 for number in numbers)
    assert {len(one.top) for one in choice.told.logprobs} == ({3} if of == "processed" else {20})
