"""Kinds 6, 20 and 21: at the end of the context, with nothing to go on from, and where there is no law to draw from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from outrider import AsyncClient
from outrider.errors import InvalidRequest as InvalidCall
from outrider.errors import ServerError
from scheduler.errors import InvalidRequest, SequenceFailed
from services.generation import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt, UserRequest
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from tools.characters import byte_level
from tools.continuations import LawContinuation
from tools.lab import Choice, Lab, served
from tools.lab_grid import DRAFTERS, equal_everywhere
from tools.parameters import bare
from tools.scripted import ScriptedDrafter, oracle
from tools.table_drafter import AgreeingLaw, TableDrafter
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel

WRITER = byte_level()
LAW = WRITER.law()
CONTEXT = 40


def prompt_of(length: int) -> TokenPrompt:
    return TokenPrompt(tuple(97 + (7 * i + length) % 26 for i in range(length)))


def at(length: int, max_tokens: int | None = None) -> UserRequest:
    return UserRequest(prompt_of(length), max_tokens=max_tokens, temperature=0.9, seed=length, ignore_eos=True)


async def test_kind06_an_answer_ends_at_the_context_as_it_does_plainly() -> None:
    """Numbers 31, 36, 37, 38: prompts of context - K - 2 to context - 1 for every K of the grid."""
    requests = [at(length) for length in range(CONTEXT - 10, CONTEXT)]
    requests += [at(length, CONTEXT - length) for length in range(CONTEXT - 10, CONTEXT, 3)]
    requests += [replace(at(CONTEXT - 9), n=2, top_logprobs=1), replace(at(CONTEXT - 8), stop=("never",))]
    async with Lab.of(WRITER, LAW, context_length=CONTEXT) as lab:
        grid = await equal_everywhere(lab, LAW, requests, share=2)
        for choice in (choice for choices in grid.plain for choice in choices):
            assert choice.told.prompt_tokens + choice.told.completion_tokens == CONTEXT
            assert choice.told.finish_reason == "length"
            assert choice.told.text == WRITER.decode(choice.told.token_ids)


async def test_kind06_what_does_not_fit_is_refused_by_name_and_nobody_is_harmed() -> None:
    async with Lab.of(WRITER, LAW, context_length=CONTEXT) as lab, served(lab.plain) as address:
        async with AsyncClient(address) as client:
            for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
                with pytest.raises(InvalidCall, match=f"{length} tokens.*at most {CONTEXT - 1}") as caught:
                    await client.complete(token_ids=[97] * length)
                assert caught.value.field == "prompt"
            with pytest.raises(InvalidCall, match="max_tokens is 36, must be at most 35") as caught:
                await client.complete(token_ids=[97] * 5, max_tokens=36)
            assert caught.value.field == "max_tokens"
            answer = await client.complete(token_ids=[97] * (CONTEXT - 1), ignore_eos=True)
        assert (answer.finished.completion_tokens, answer.finished.finish_reason.value) == (1, "length")


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: ScriptedDrafter(oracle, LawContinuation(LAW), context_length=16),
        lambda: TableDrafter(LAW, 0.9, context_length=16),
        lambda: ModelDrafter(TableModel(AgreeingLaw(LAW, 0.9), context_length=16)),
    ],
    ids=["scripted", "table", "model"],
)
async def test_kind06_past_a_short_drafters_context_the_text_is_the_plain_one(drafter: Callable[[], Drafter]) -> None:
    """Numbers 32, 33, 35, beside prompts that the drafter never takes."""
    requests = [at(length, 30) for length in (1, 5, 9, 13, 15, 16, 17, 60)]
    async with Lab.of(WRITER, LAW, context_length=128) as lab:
        station = await lab.station(drafter())
        answers = await asyncio.gather(*(station.one(replace(request, draft_length=5)) for request in requests))
        assert [answer.told for answer in answers] == [await lab.plainly(request) for request in requests]
    drafted = [answer.summary.num_drafts for answer in answers]
    assert drafted[0] > 0
    assert drafted[-1] == 0
    assert all(answer.summary.num_plain_steps > 0 for answer in answers)
    assert not any(answer.summary.fallbacks for answer in answers), "a drafter at its context has not failed"


EMPTY: dict[str, tuple[UserRequest, str]] = {
    "no prompt": (UserRequest(None), "prompt"),
    "empty text": (UserRequest(TextPrompt("")), "prompt"),
    "no token ids": (UserRequest(TokenPrompt(())), "prompt"),
    "no messages": (UserRequest(ChatPrompt(())), "messages"),
    "no tokens asked": (UserRequest(TextPrompt("a"), max_tokens=0), "max_tokens"),
    "empty stop text": (UserRequest(TextPrompt("a"), stop=("",)), "stop"),
    "empty bad word": (UserRequest(TextPrompt("a"), bad_words=("",)), "bad_words"),
    "no choice": (UserRequest(TextPrompt("a"), n=0), "n"),
    "no draft": (UserRequest(TextPrompt("a"), draft_length=0), "draft_length"),
}


async def with_neighbours(
    lab: Lab, asked: Sequence[Callable[[], Awaitable[object]]], count: int = 20
) -> list[BaseException | object]:
    """Runs them in the middle of 20 others, which must be told what they are told alone. Returns results or errors."""
    station = await lab.station(TableDrafter(LAW, 0.8))
    requests = [bare(400 + i, 0.9) for i in range(count)]
    neighbours = [asyncio.create_task(station.one(request)) for request in requests]
    results = await asyncio.gather(*(ask() for ask in asked), return_exceptions=True)
    answers = await asyncio.gather(*neighbours)
    assert [answer.told for answer in answers] == [await lab.plainly(request) for request in requests]
    return list(results)


async def test_kind20_what_is_empty_is_refused_by_name_and_nobody_is_harmed() -> None:
    """Numbers 100 and 102."""
    async with Lab.of(WRITER, LAW) as lab:
        asked = [lambda request=request: lab.plain.ask(request) for request, _ in EMPTY.values()]
        results = await with_neighbours(lab, asked)
    for (name, (_, field)), result in zip(EMPTY.items(), results, strict=True):
        assert isinstance(result, InvalidRequest), name
        assert result.field == field, name


async def test_kind20_an_empty_prompt_over_grpc_names_its_field() -> None:
    async with Lab.of(WRITER, LAW) as lab, served(lab.plain) as address, AsyncClient(address) as client:
        for prompt, options in (("", {}), (None, {"token_ids": []}), ("a", {"max_tokens": 0})):
            with pytest.raises(InvalidCall) as caught:
                await client.complete(prompt, **options)
            assert caught.value.field == ("max_tokens" if options.get("max_tokens") == 0 else "prompt")
        assert (await client.complete("a", max_tokens=2, ignore_eos=True)).finished.completion_tokens == 2


async def test_kind20_answers_that_are_over_at_once_are_the_plain_ones() -> None:
    """The first token ends it: the model's own end, a stop token, a stop text; and a turn without content."""
    end = ((WRITER.end_id, 100.0),)
    base = bare(420, 0.0)
    async with Lab.of(WRITER, LAW) as lab:
        first = await lab.plainly(replace(base, max_tokens=1))
        requests = [
            replace(base, ignore_eos=False, logit_bias=end),
            replace(base, ignore_eos=False, logit_bias=end, temperature=1.0, top_logprobs=1, n=2),
            replace(base, stop_token_ids=first.token_ids),
            replace(base, stop=(first.text[:1],)),
            replace(base, stop=(first.text[:1],), include_stop_str_in_output=True),
            replace(base, max_tokens=1),
            replace(base, prompt=ChatPrompt((ChatMessage("user", ""),)), max_tokens=6),
            replace(base, prompt=ChatPrompt((ChatMessage("", ""), ChatMessage("user", "a"))), max_tokens=6),
        ]
        grid = await equal_everywhere(lab, LAW, requests)
    told = [choices[0].told for choices in grid.plain]
    assert [(one.text, one.completion_tokens, one.finish_reason) for one in told[:2]] == [("", 1, "stop")] * 2
    assert [one.completion_tokens for one in told[2:6]] == [1] * 4
    assert [one.text for one in told[3:5]] == ["", first.text[:1]]
    assert [one.finish_reason for one in told[2:6]] == ["stop", "stop", "stop", "length"]
    assert all(one.completion_tokens == 6 for one in told[6:])


MARKED = replace(bare(430, 0.9), prompt=TokenPrompt((35, 97, 98)))
"""The sequence whose rows are bad from its sixth token on."""


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["oracle", "anti", "tree", "table", "none"])
@pytest.mark.parametrize("kind", [FaultKind.NAN, FaultKind.INFINITE])
async def test_kind21_a_bad_row_ends_its_own_request_with_an_error_and_no_other(
    kind: FaultKind, drafter: str, temperature: float
) -> None:
    """Numbers 103 and 106: what is told before it is what plain decoding tells before it."""
    model = TableModel(LAW, name=WRITER.name, faults=[Fault(kind, marker=35, from_length=3 + 6)])
    bad = replace(MARKED, temperature=temperature, draft_length=4)
    requests = [bare(440 + i, 0.9) for i in range(6)]
    async with Lab.of(WRITER, LAW, model=model) as lab:
        station = lab.plain if drafter == "none" else await lab.station(DRAFTERS[drafter](LAW, LawContinuation(LAW)))
        ours, plain, *answers = await asyncio.gather(
            _told_until_failure(station.gateway.generate, bad),
            _told_until_failure(lab.plain.gateway.generate, bad),
            *(station.one(request) for request in requests),
        )
        assert isinstance(ours, list)
        assert len(ours) == 6
        assert ours == plain
        alone = [await lab.plainly(request) for request in requests]
        assert [answer.told for answer in answers if isinstance(answer, Choice)] == alone


async def _told_until_failure(generate: Callable[..., object], request: UserRequest) -> list[int]:
    token_ids: list[int] = []
    with pytest.raises(SequenceFailed):
        async for event in generate(request):  # type: ignore[attr-defined]
            token_ids += getattr(event, "token_ids", ())
    return token_ids


async def test_kind21_a_bad_row_is_an_internal_error_over_grpc_and_the_server_goes_on() -> None:
    model = TableModel(LAW, name=WRITER.name, faults=[Fault(FaultKind.NAN, marker=35)])
    async with Lab.of(WRITER, LAW, model=model) as lab, served(lab.plain) as address, AsyncClient(address) as client:
        with pytest.raises(ServerError):
            await client.complete(token_ids=[35, 97])
        assert (await client.complete("a", max_tokens=3, ignore_eos=True)).finished.completion_tokens == 3


async def test_kind21_bad_rows_of_a_drafter_leave_the_text_the_plain_one() -> None:
    faults = [
        Fault(kind, marker=marker, from_length=5) for kind, marker in ((FaultKind.NAN, 35), (FaultKind.INFINITE, 36))
    ]
    drafter = ModelDrafter(TableModel(AgreeingLaw(LAW, 0.9), faults=faults))
    requests = [replace(MARKED, prompt=TokenPrompt((first, 97)), seed=first) for first in (35, 36, 37, 38)]
    async with Lab.of(WRITER, LAW) as lab:
        station = await lab.station(drafter)
        answers = await asyncio.gather(*(station.one(request) for request in requests))
        assert [answer.told for answer in answers] == [await lab.plainly(request) for request in requests]
    assert sum(answer.summary.num_accepted_tokens for answer in answers) > 0
    assert any(answer.summary.fallbacks for answer in answers)


@dataclass(frozen=True)
class FlatLaw(TableLaw):
    """Every token is as good as any other."""

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return np.zeros(self.vocabulary_size, np.float32)


async def test_kind21_degenerate_laws_are_drawn_from_as_plainly() -> None:
    """All equal; one token only; temperatures and filters at the ends of their ranges; p = q exactly (number 104)."""
    flat = FlatLaw(len(WRITER.pieces))
    base = bare(460, 1.0)
    requests = [
        replace(base, temperature=0.0),
        base,
        replace(base, temperature=1e-45),
        replace(base, temperature=100.0),
        replace(base, top_p=1e-45),
        replace(base, top_p=0.5, min_p=1.0, typical_p=1e-6),
        replace(base, top_k=1),
        replace(base, allowed_token_ids=(98,)),
        replace(base, repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=2.0),
        replace(base, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=-2.0),
        replace(base, logit_bias=tuple((i, -100.0) for i in range(len(WRITER.pieces)))),
        replace(base, bad_words=tuple("abc"), top_logprobs=20),
    ]
    for law in (flat, LAW):
        async with Lab.of(WRITER, law) as lab:
            await equal_everywhere(lab, law, requests, share=4)
            twin = await lab.station(ModelDrafter(TableModel(law)))
            for request in requests:
                answer = await twin.one(replace(request, draft_length=4))
                assert answer.told == await lab.plainly(request)
                assert answer.summary.acceptance_rate == 1.0
                assert max(answer.told.token_ids) < len(WRITER.pieces)
