"""Kinds 4 to 6: a sequence ends where it would end plainly, whatever block the end lies in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.errors import InvalidRequest
from scheduler.request import GenerationRequest, Speculation
from specdec.commit import FinishReason
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from tools.cases import GREEDY, SAMPLED, check_all, expected, total
from tools.continuations import LawContinuation, plain_output
from tools.deployment import Deployment, quick_config
from tools.scripted import RandomTree, ScriptedDrafter, WrongFrom, empty, oracle
from tools.table_drafter import AgreeingLaw, TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(order=1000)
PROMPT = (3, 1, 4, 1, 5)

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "oracle": lambda: ScriptedDrafter(oracle, LawContinuation(LAW)),
    "half": lambda: ScriptedDrafter(WrongFrom(2, 64), LawContinuation(LAW)),
    "tree": lambda: ScriptedDrafter(RandomTree(3, 64), LawContinuation(LAW)),
    "empty": lambda: ScriptedDrafter(empty, LawContinuation(LAW)),
    "table": lambda: TableDrafter(LAW, 0.8),
    "model": lambda: ModelDrafter(TableModel(AgreeingLaw(LAW, 0.8))),
    "ngram": lambda: NgramDrafter(1, 2),
}
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())


@every_drafter
async def test_kind4_nothing_behind_a_stop_token_is_committed(drafter: Callable[[], Drafter]) -> None:
    """Each of the first nine tokens in turn is declared the stop token; K 8 and 16, and K 0 as the fallback path."""
    requests = [
        GenerationRequest(PROMPT, sampling, max_tokens=20, stop_token_ids=frozenset({stop}), draft_length=length)
        for sampling, length in ((SAMPLED, 0), (SAMPLED, 8), (GREEDY, 16))
        for stop in plain_output(LAW, PROMPT, sampling, 9)
    ]
    async with Deployment([TableModel(LAW)], [drafter()]) as system:
        answers = await check_all(system, LAW, requests)
    assert all(answer.finish_reason is FinishReason.STOP for answer in answers)
    assert len({len(answer.token_ids) for answer in answers}) >= 7


async def test_kind4_stop_tokens_are_text_when_nobody_asked_to_stop() -> None:
    """Number 25: ignoring the model's own stop tokens is an empty set of them."""
    request = GenerationRequest(PROMPT, GREEDY, max_tokens=30)
    async with Deployment([TableModel(LAW)], [DRAFTERS["oracle"]()]) as system:
        (answer,) = await check_all(system, LAW, [request])
    assert len(answer.token_ids) == 30


@every_drafter
async def test_kind4_stop_tokens_are_not_drawn_before_min_tokens(drafter: Callable[[], Drafter]) -> None:
    stops = frozenset(plain_output(LAW, PROMPT, SAMPLED, 12))
    requests = [
        GenerationRequest(PROMPT, SAMPLED, max_tokens=30, min_tokens=least, stop_token_ids=stops)
        for least in (0, 1, 2, 5, 13, 30)
    ]
    async with Deployment([TableModel(LAW)], [drafter()], quick_config(6)) as system:
        answers = await check_all(system, LAW, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert not stops & set(answer.token_ids[: request.min_tokens])


@every_drafter
@pytest.mark.parametrize("length", [3, 16])
async def test_kind5_exactly_max_tokens_are_delivered(drafter: Callable[[], Drafter], length: int) -> None:
    requests = [GenerationRequest(PROMPT, SAMPLED, max_tokens=count) for count in range(1, 21)]
    async with Deployment([TableModel(LAW)], [drafter()], quick_config(length)) as system:
        answers = await check_all(system, LAW, requests)
    assert [len(answer.token_ids) for answer in answers] == list(range(1, 21))


@pytest.mark.parametrize("cap", [2, 3, 4, 5])
async def test_kind5_a_stop_token_wins_over_the_budget_it_shares_a_block_with(cap: int) -> None:
    """Number 27: stop at position 3, cap 5, block of 6. At the cap itself the stop wins too."""
    plain = plain_output(LAW, PROMPT, GREEDY, 6)
    assert plain.index(plain[2]) == 2
    request = GenerationRequest(PROMPT, GREEDY, max_tokens=cap, stop_token_ids=frozenset({plain[2]}), draft_length=6)
    async with Deployment([TableModel(LAW)], [DRAFTERS["oracle"]()]) as system:
        (answer,) = await check_all(system, LAW, [request])
    assert len(answer.token_ids) == min(cap, 3)
    assert answer.finish_reason is (FinishReason.LENGTH if cap == 2 else FinishReason.STOP)


CONTEXT = 40


def long_prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * i + length) % 64 for i in range(length))


@every_drafter
@pytest.mark.parametrize("length", [1, 5])
async def test_kind6_sequences_end_at_the_context_and_no_worker_dies(
    drafter: Callable[[], Drafter], length: int
) -> None:
    requests = [GenerationRequest(long_prompt(n), SAMPLED) for n in range(CONTEXT - length - 2, CONTEXT)]
    exact = [GenerationRequest(r.token_ids, SAMPLED, max_tokens=CONTEXT - len(r.token_ids)) for r in requests]
    async with Deployment([TableModel(LAW, context_length=CONTEXT)], [drafter()], quick_config(length)) as system:
        answers = await check_all(system, LAW, [*requests, *exact], CONTEXT)
        for request, answer in zip([*requests, *exact], answers, strict=True):
            assert len(request.token_ids) + len(answer.token_ids) == CONTEXT
        await system.idle()
        system.models[0].check_integrity()


@pytest.mark.parametrize("speculation", list(Speculation))
async def test_kind6_a_prompt_that_fills_the_context_is_refused_by_name(speculation: Speculation) -> None:
    async with Deployment([TableModel(LAW, context_length=CONTEXT)], [DRAFTERS["oracle"]()]) as system:
        for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
            with pytest.raises(InvalidRequest, match=f"{length} tokens.*context of {CONTEXT}"):
                await system.generate(GenerationRequest(long_prompt(length), SAMPLED, speculation=speculation))
        with pytest.raises(InvalidRequest, match="max_tokens is 36") as caught:
            await system.generate(GenerationRequest(long_prompt(5), SAMPLED, max_tokens=CONTEXT - 4))
        assert caught.value.field == "max_tokens"
        await check_all(system, LAW, [GenerationRequest(long_prompt(5), SAMPLED)], CONTEXT)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: ScriptedDrafter(oracle, LawContinuation(LAW), context_length=16),
        lambda: TableDrafter(LAW, 0.9, context_length=16),
        lambda: ModelDrafter(TableModel(AgreeingLaw(LAW, 0.9), context_length=16)),
    ],
    ids=["scripted", "table", "model"],
)
async def test_kind6_past_a_short_drafters_context_decoding_is_plain(drafter: Callable[[], Drafter]) -> None:
    """Numbers 32, 33, 35: with 16 other requests running."""
    requests = [GenerationRequest(long_prompt(n), SAMPLED, max_tokens=40) for n in range(1, 18)]
    requests.append(GenerationRequest(long_prompt(60), SAMPLED, max_tokens=40))
    async with Deployment([TableModel(LAW, context_length=256)], [drafter()], quick_config(5)) as system:
        answers = await check_all(system, LAW, requests, 256)
    figures = total(answers)
    assert figures.num_drafts > 0
    assert figures.num_plain_steps > 16 * 20
    assert figures.fallbacks == {}


async def test_kind6_a_draft_longer_than_the_kv_that_is_left_changes_nothing() -> None:
    """Number 36: 16 candidates where the pool has room for a few; sequences take turns instead."""
    requests = [GenerationRequest(long_prompt(n), SAMPLED, max_tokens=20, draft_length=16) for n in range(1, 9)]
    model = TableModel(LAW, context_length=64, blocks_total=16, page=4)
    async with Deployment([model], [DRAFTERS["oracle"]()]) as system:
        await check_all(system, LAW, requests, 64)
        await system.idle()
        model.check_integrity()


def test_the_references_of_these_tests_stop_where_they_say() -> None:
    request = GenerationRequest(PROMPT, GREEDY, max_tokens=30)
    assert len(expected(LAW, request).token_ids) == 30
    assert expected(LAW, request, context_length=12).finish_reason is FinishReason.LENGTH
    assert len(expected(LAW, request, context_length=12).token_ids) == 7
