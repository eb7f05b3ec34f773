"""Kind 17: the figures that an answer ends with are counted exactly, and mean the same in both APIs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from outrider import AsyncClient
from outrider import Completion as Answer
from services.generation import TokenPrompt, UserRequest
from tools.characters import byte_level
from tools.continuations import LawContinuation
from tools.lab import Choice, Lab, served
from tools.lab_grid import CELLS, DRAFTERS, FALLBACKS
from tools.parameters import bare

WRITER = byte_level()
LAW = WRITER.law()


async def ask(drafter: str, requests: list[UserRequest]) -> list[Choice]:
    async with Lab.of(WRITER, LAW) as lab:
        station = lab.plain if drafter == "none" else await lab.station(DRAFTERS[drafter](LAW, LawContinuation(LAW)))
        return list(await asyncio.gather(*(station.one(request) for request in requests)))


@pytest.mark.parametrize("length", [1, 2, 4, 8])
async def test_kind17_an_oracles_rate_is_exactly_one_and_an_antis_exactly_zero(length: int) -> None:
    """Numbers 89 and 90: ten rounds and one plain step at the end, K drafted in each."""
    tokens = 10 * (length + 1) + 1
    requests = [replace(bare(700 + i, t), max_tokens=tokens, draft_length=length) for i, t in enumerate((0.0, 0.9))]
    for choice in await ask("oracle", requests):
        figures = choice.summary
        assert (figures.num_drafts, figures.num_draft_tokens, figures.num_accepted_tokens) == (
            10,
            10 * length,
            10 * length,
        )
        assert (figures.acceptance_rate, figures.num_plain_steps) == (1.0, 1)
        assert list(figures.num_accepted_tokens_per_position) == [10] * length
        assert figures.mean_acceptance_length == length + 1
    for choice in await ask("anti", requests):
        figures = choice.summary
        assert figures.num_drafts == tokens - 1
        assert (figures.num_accepted_tokens, figures.acceptance_rate, figures.mean_acceptance_length) == (0, 0.0, 1.0)


async def test_kind17_without_drafts_there_is_no_rate_and_not_nan() -> None:
    """Number 91, in both APIs."""
    (choice,) = await ask("none", [bare(710, 0.9)])
    assert choice.summary.acceptance_rate is None
    assert (choice.summary.num_drafts, choice.summary.mean_acceptance_length, choice.summary.mode) == (0, 0.0, "plain")
    async with Lab.of(WRITER, LAW) as lab, served(lab.plain) as address, AsyncClient(address) as client:
        answer = await client.complete("a", max_tokens=4, ignore_eos=True)
    assert answer.finished.speculation.acceptance_rate is None
    assert answer.finished.speculation.mode == "plain"


def _consistent(choice: Choice) -> bool:
    figures, told = choice.summary, choice.told
    rate = figures.acceptance_rate
    return (
        0 <= figures.num_accepted_tokens <= figures.num_draft_tokens
        and sum(figures.num_accepted_tokens_per_position) == figures.num_accepted_tokens
        and list(figures.num_accepted_tokens_per_position)
        == sorted(figures.num_accepted_tokens_per_position, reverse=True)
        and (rate is None) == (figures.num_draft_tokens == 0)
        and (rate is None or 0.0 <= rate <= 1.0)
        and round(figures.mean_acceptance_length * figures.num_drafts) + figures.num_plain_steps
        == told.completion_tokens
    )


@pytest.mark.parametrize("drafter", sorted({cell.drafter for cell in CELLS}))
async def test_kind17_figures_agree_with_what_was_told_wherever_the_answer_ends(drafter: str) -> None:
    """Budgets, stop texts and stop tokens inside a block: what lies behind the end is counted nowhere as told."""
    base = bare(720, 0.9)
    async with Lab.of(WRITER, LAW) as lab:
        told = await lab.plainly(base)
    requests = [replace(base, max_tokens=count, draft_length=4) for count in range(1, 14)]
    requests += [replace(base, stop=(told.text[i : i + 2],), draft_length=8) for i in range(8)]
    requests += [replace(base, stop_token_ids=(told.token_ids[i],), draft_length=8) for i in range(8)]
    choices = await ask(drafter, requests)
    for request, choice in zip(requests, choices, strict=True):
        assert _consistent(choice), (request, choice.summary)
        if drafter in ("oracle", "tree"):
            accepted = choice.summary.num_accepted_tokens
            assert accepted <= choice.told.completion_tokens
    if drafter not in (*FALLBACKS, "ngram"):
        assert sum(choice.summary.num_drafts for choice in choices) > 0


async def test_kind17_the_same_request_id_twice_is_counted_twice() -> None:
    """Number 92."""
    request = replace(bare(730, 0.9), request_id="same", draft_length=4, max_tokens=21)
    first, second = await ask("oracle", [request, request])
    assert first.told == second.told
    assert first.summary.num_draft_tokens == second.summary.num_draft_tokens == 16


async def test_kind17_grpc_tells_the_same_figures() -> None:
    request = replace(bare(740, 0.0), draft_length=4, max_tokens=23)
    assert isinstance(request.prompt, TokenPrompt)
    async with Lab.of(WRITER, LAW) as lab:
        station = await lab.station(DRAFTERS["half"](LAW, LawContinuation(LAW)))
        ours = (await station.one(request)).summary
        async with served(station) as address, AsyncClient(address) as client:
            answer: Answer = await client.complete(
                token_ids=request.prompt.token_ids,
                max_tokens=23,
                temperature=0.0,
                seed=740,
                ignore_eos=True,
                draft_length=4,
            )
    theirs = answer.finished.speculation
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_plain_steps", "mode", "acceptance_rate"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.num_accepted_tokens_per_position == tuple(ours.num_accepted_tokens_per_position)
    assert ours.num_drafts > 0
