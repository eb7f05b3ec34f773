"""Kinds 4 and 5: an answer ends where it ends plainly, and plainly where its text says so, whatever was drafted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider import AsyncClient
from services.generation import TextPrompt, TokenPrompt, UserRequest
from specdec.params import LogprobsOf
from tools.characters import Writer, byte_fallback, byte_level, windowed
from tools.lab import Lab, Told, read, served
from tools.lab_grid import equal_everywhere
from tools.parameters import bare

WRITER = byte_level()
LAW = WRITER.law()
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def ends_at(token_ids: Sequence[int], stops: Sequence[str], include: bool, least: int = 0) -> tuple[int, str]:
    """How many tokens an answer keeps and its text, from full decodes alone: after each token in turn, is there a stop
    text that ends in what this token added?"""
    before = ""
    for count in range(1, len(token_ids) + 1):
        text = WRITER.decode(token_ids[:count])
        text = text.removesuffix(REPLACEMENT) if text.endswith(REPLACEMENT) else text
        ends = [
            (at + len(stop), -len(stop), at)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if ends and count > least:
            end, _, start = min(ends)
            return count, text[: end if include else start]
        before = text
    return len(token_ids), WRITER.decode(token_ids)


def stop_requests(plain: Sequence[Told], bases: Sequence[UserRequest]) -> list[UserRequest]:
    """Texts of each answer's tokens 1 to 9 as stops: whole pieces, and texts that straddle two tokens and more."""
    requests = []
    for number, (told, base) in enumerate(zip(plain, bases, strict=True)):
        ends = [len("".join(told.pieces[:count])) for count in range(len(told.pieces) + 1)]
        for j in range(1, 10):
            end = ends[j] + (j + number) % 3
            start = max(ends[j - 1] - (j + number) % 4, 0)
            stop = told.text[start:end] or told.text[end : end + 1]
            include = (j + number) % 2 == 0
            others = ("never", told.text[end : end + 2] or "never") if j % 3 == 0 else ()
            requests.append(replace(base, stop=(stop, *others), include_stop_str_in_output=include))
    return requests


async def test_kind04_stop_texts_end_an_answer_where_they_do_plainly() -> None:
    """Numbers 21, 22 and 26: ids, logprobs and usage end with the text, for every proposer and in fallback."""
    bases = [bare(200 + i, temperature) for i, temperature in enumerate((0.0, 0.9, 1.1, 1.3))]
    async with Lab.of(WRITER, LAW) as lab:
        unstopped = await asyncio.gather(*(lab.plainly(base) for base in bases))
        requests = [replace(request, top_logprobs=1) for request in stop_requests(unstopped, bases)]
        grid = await equal_everywhere(lab, LAW, requests, share=5)
    for number, (request, (choice,)) in enumerate(zip(requests, grid.plain, strict=True)):
        told = choice.told
        count, text = ends_at(unstopped[number // 9].token_ids, request.stop, request.include_stop_str_in_output)
        assert (told.token_ids, told.text) == (unstopped[number // 9].token_ids[:count], text), request
        assert told.finish_reason == "stop"
        assert told.stop_text in request.stop
        assert len(told.logprobs) == len(told.token_ids) == told.completion_tokens
    assert len({choice.told.completion_tokens for (choice,) in grid.plain}) >= 7


async def test_kind04_stop_tokens_ends_and_least_lengths_are_those_of_plain_decoding() -> None:
    """Numbers 23, 25 and 26, with what else bends an end: min_tokens, several choices, an echoed prompt."""
    bases = [bare(220 + i, temperature) for i, temperature in enumerate((0.0, 1.0, 1.2))]
    async with Lab.of(WRITER, LAW) as lab:
        requests = []
        for base in bases:
            told = await lab.plainly(base)
            requests += [replace(base, stop_token_ids=(told.token_ids[j],)) for j in range(9)]
            stop = told.text[3:5]
            requests += [
                replace(base, stop=(stop,), min_tokens=6),
                replace(base, stop=(stop,), n=3),
                replace(base, stop=(stop,), echo=True),
                replace(base, ignore_eos=False, logit_bias=((WRITER.end_id, 4.0),), max_tokens=40),
                replace(base, ignore_eos=False, logit_bias=((WRITER.end_id, 4.0),), min_tokens=9, max_tokens=40),
                replace(base, ignore_eos=True, logit_bias=((WRITER.end_id, 4.0),)),
            ]
        grid = await equal_everywhere(lab, LAW, requests, share=5)
    for request, choices in zip(requests, grid.plain, strict=True):
        for told in (choice.told for choice in choices):
            stops = {*request.stop_token_ids} if request.ignore_eos else {*request.stop_token_ids, WRITER.end_id}
            assert not stops & set(told.token_ids[:-1])
            assert told.completion_tokens >= (request.min_tokens or 0)
    ended = [
        choices[0].told
        for request, choices in zip(requests, grid.plain, strict=True)
        if not request.ignore_eos and choices[0].told.token_ids[-1] == WRITER.end_id
    ]
    assert len(ended) >= 2
    assert all(told.finish_reason == "stop" for told in ended)
    assert all(WRITER.end_id in told.token_ids[:-1] for told in (grid.plain[i][0].told for i in (14, 29, 44)))


async def test_kind04_a_partial_stop_text_is_told_neither_early_nor_late() -> None:
    """What is held back comes with the last token when the stop text does not, in every cell the same pieces."""
    base = bare(240, 0.9)
    async with Lab.of(WRITER, LAW) as lab:
        text = (await lab.plainly(base)).text
        stops = [(text[i : i + 5] + "§",) for i in range(len(text))] + [(text[-4:] + "§",)]
        requests = [replace(base, stop=stop) for stop in stops]
        grid = await equal_everywhere(lab, LAW, requests, share=5)
    for (choice,) in grid.plain:
        assert (choice.told.text, choice.told.stop_text, choice.told.finish_reason) == (text, None, "length")


@pytest.mark.parametrize("writer", [byte_fallback(), windowed()], ids=lambda writer: writer.name)
async def test_kind04_stop_texts_with_other_tokenizers(writer: Writer) -> None:
    law = writer.law()
    bases = [replace(bare(i, 1.0), prompt=TokenPrompt((97, 98 + i))) for i in range(4)]
    async with Lab.of(writer, law) as lab:
        unstopped = await asyncio.gather(*(lab.plainly(base) for base in bases))
        requests = [
            replace(base, stop=(told.text[j : j + 2],), include_stop_str_in_output=j % 4 == 0)
            for base, told in zip(bases, unstopped, strict=True)
            for j in range(1, 8, 2)
        ]
        grid = await equal_everywhere(lab, law, requests, share=3)
    for request, (choice,) in zip(requests, grid.plain, strict=True):
        assert choice.told.stop_text in request.stop
        whole = writer.decode(choice.told.token_ids)
        assert whole.startswith(choice.told.text)


async def test_kind04_grpc_tells_what_the_gateway_tells() -> None:
    """Streamed by the SDK: nothing behind the stop, no event behind the last."""
    request = replace(bare(250, 0.9), prompt=TextPrompt("the good"), top_logprobs=2, logprobs_of=LogprobsOf.PROCESSED)
    async with Lab.of(WRITER, LAW) as lab:
        text = (await lab.plainly(request)).text
        stop = text[6:9]
        told = await lab.plainly(replace(request, stop=(stop,)))
        async with served(lab.plain) as address, AsyncClient(address) as client:
            events = [
                event
                async for event in client.generate(
                    "the good",
                    max_tokens=request.max_tokens,
                    temperature=request.temperature,
                    seed=250,
                    ignore_eos=True,
                    stop=stop,
                    top_logprobs=2,
                    logprobs_of="processed",
                )
            ]
    (choice,) = read(events)
    assert choice.told.differences(told) == []
    assert (choice.told.stop_text, choice.told.finish_reason) == (stop, "stop")
    assert choice.told.text == text[: text.index(stop)]


async def test_kind05_exactly_max_tokens_are_delivered_and_counted() -> None:
    """Numbers 28 and 29. An answer that is cut inside a character says so as its full decode does."""
    requests = [replace(bare(260 + count, 1.0), max_tokens=count) for count in range(1, 21)]
    async with Lab.of(WRITER, LAW) as lab:
        grid = await equal_everywhere(lab, LAW, requests, share=3)
    for request, (choice,) in zip(requests, grid.plain, strict=True):
        told = choice.told
        assert len(told.token_ids) == told.completion_tokens == request.max_tokens
        assert told.finish_reason == "length"
        assert told.text == WRITER.decode(told.token_ids)
    assert any(choice.told.text.endswith(REPLACEMENT) for (choice,) in grid.plain)


async def test_kind05_a_stop_text_wins_over_the_budget_it_shares_a_block_with() -> None:
    """Number 27: at position 3 with caps from 1 to 6; at the cap itself the stop wins too."""
    base = replace(bare(285, 1.0), logit_bias=tuple((ord(letter), 6.0) for letter in "abdeghinrstu"))
    async with Lab.of(WRITER, LAW) as lab:
        told = await lab.plainly(base)
        stop = "".join(told.pieces[1:3])
        assert ends_at(told.token_ids, [stop], False)[0] == 3
        assert told.token_ids[2] not in told.token_ids[:2]
        requests = [replace(base, stop=(stop,), max_tokens=cap) for cap in range(1, 7)]
        requests += [replace(base, stop_token_ids=(told.token_ids[2],), max_tokens=cap) for cap in range(1, 7)]
        grid = await equal_everywhere(lab, LAW, requests)
    for request, (choice,) in zip(requests, grid.plain, strict=True):
        cap = request.max_tokens or 0
        assert choice.told.completion_tokens == min(cap, 3)
        assert choice.told.finish_reason == ("length" if cap < 3 else "stop")
