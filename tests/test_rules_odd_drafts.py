"""Kinds 19 and 20: odd drafts are ignored or trimmed and counted; empty requests are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.errors import InvalidRequest
from scheduler.request import GenerationRequest, Speculation
from specdec.commit import FinishReason
from specdec.messages import DraftBlock, DraftResult
from tools.cases import GREEDY, SAMPLED, check_all, prompts, total
from tools.continuations import LawContinuation, plain_output
from tools.deployment import Deployment, quick_config
from tools.meddling import MEDDLES
from tools.scripted import Longer, NoTree, Script, ScriptedDrafter, Spoiled, empty, oracle
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(order=1000)


def requests(count: int = 6) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, SAMPLED, max_tokens=20) for prompt in prompts(count)]


async def test_kind19_no_draft_for_a_hundred_rounds() -> None:
    """Number 97."""
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(empty, LawContinuation(LAW))]) as system:
        (answer,) = await check_all(system, LAW, [GenerationRequest((1, 2), SAMPLED, max_tokens=100)])
    figures = total([answer])
    assert (figures.num_plain_steps, figures.num_drafts, figures.num_failovers) == (100, 0, 0)


@pytest.mark.parametrize("extra", [1, 5, 100])
async def test_kind19_more_candidates_than_asked_do_no_harm(extra: int) -> None:
    """Number 99."""
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(Longer(extra), LawContinuation(LAW))]) as system:
        figures = total(await check_all(system, LAW, requests()))
    assert figures.num_drafts > 0


@pytest.mark.parametrize(
    "script",
    [
        Spoiled(-1),
        Spoiled(-1, position=2),
        Spoiled(64),
        Spoiled(2**31 - 1),
        Spoiled(2**31),
        Spoiled(2**40),
        NoTree(0),
        NoTree(7),
        NoTree(-2),
        Longer(1000),
    ],
    ids=["-1", "-1 later", "64", "2^31-1", "2^31", "2^40", "parent 0", "parent 7", "parent -2", "1000 too many"],
)
async def test_kind19_a_block_that_is_no_tree_of_real_ids_is_dropped_and_counted(script: Script) -> None:
    """Number 98: none of it reaches a forward. The worker is blamed, and the text goes on plainly."""
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(script, LawContinuation(LAW))]) as system:
        answers = await check_all(system, LAW, requests())
        assert await system.state_of("draft-0") in ("suspended", "ready")
    figures = total(answers)
    assert figures.num_drafts == 0
    assert figures.fallbacks.get("failed", 0) >= 1
    assert figures.num_failovers == 0


@pytest.mark.parametrize("name", sorted(MEDDLES.keys() - {"mute", "untouched"}))
async def test_kind19_forged_blocks_change_nothing_and_are_counted(name: str) -> None:
    """Old epochs, foreign owners and sequences, blocks twice, bases that are no log's: before or behind good ones."""
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        system.drafts[0].meddle = MEDDLES[name]()
        figures = total(await check_all(system, LAW, requests()))
        counted = system.scheduler.refused_results + figures.num_stale_blocks
        counted += system.targets[0].worker.load().stale_blocks
    assert figures.num_failovers == 0
    assert figures.num_drafts > 0
    # A block that comes twice at once is the same verify twice; a sequence that does not exist is nobody's to count.
    assert counted > 0 or name in ("foreign_sequence", "duplicated")


@pytest.mark.parametrize("name", ["base_beyond", "wrong_digest"])
async def test_kind19_nothing_but_stale_blocks_does_not_stop_the_text(name: str) -> None:
    """A block came, so none is late, and yet the target hears of none: it must not run out of its grant."""

    def only_forged(results: list[DraftResult]) -> list[DraftResult]:
        forged = MEDDLES[name]()(results)
        return [r for r in forged if not isinstance(r.body, DraftBlock) or r not in results]

    config = replace(quick_config(), grant_tokens=4, draft_timeout=0.05, min_draft_patience=0.01)
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))], config) as system:
        system.drafts[0].meddle = only_forged
        figures = total(await check_all(system, LAW, requests(2)))
    assert figures.num_failovers == 0


async def test_kind19_a_mute_drafter_is_not_waited_for_and_then_left_alone() -> None:
    config = replace(quick_config(), draft_timeout=0.05, min_draft_patience=0.01, suspend_time=60.0)
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))], config) as system:
        system.drafts[0].meddle = MEDDLES["mute"]()
        figures = total(await check_all(system, LAW, requests()))
        assert await system.state_of("draft-0") == "suspended"
        asked = len(system.drafts[0].items)
        await check_all(system, LAW, requests())
        assert len(system.drafts[0].items) == asked
    assert figures.fallbacks["late"] >= 2
    assert figures.num_drafts == 0


@pytest.mark.parametrize("speculation", list(Speculation))
async def test_kind20_an_empty_prompt_is_refused_and_neighbours_go_on(speculation: Speculation) -> None:
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        with pytest.raises(InvalidRequest, match="prompt is empty") as caught:
            await system.generate(GenerationRequest((), SAMPLED, speculation=speculation))
        assert caught.value.field == "prompt"
        with pytest.raises(InvalidRequest, match="max_tokens is 0") as caught:
            await system.generate(GenerationRequest((1,), SAMPLED, max_tokens=0, speculation=speculation))
        assert caught.value.field == "max_tokens"
        await check_all(system, LAW, requests(20))
        await system.idle()
    assert system.recorder.records == {}


@pytest.mark.parametrize("speculation", list(Speculation))
async def test_kind20_the_first_token_may_be_the_last(speculation: Speculation) -> None:
    first = plain_output(LAW, (5,), GREEDY, 1)[0]
    request = GenerationRequest(
        (5,), GREEDY, max_tokens=9, stop_token_ids=frozenset({first}), speculation=speculation, draft_length=6
    )
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        answer, *_ = await check_all(system, LAW, [request, *requests(20)])
    assert (answer.token_ids, answer.finish_reason) == ([first], FinishReason.STOP)


@pytest.mark.parametrize("length", [0, 1])
async def test_kind20_a_draft_length_of_nothing_is_plain(length: int) -> None:
    request = GenerationRequest((5, 6), SAMPLED, max_tokens=9, draft_length=length, speculation=Speculation.ON)
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        (answer,) = await check_all(system, LAW, [request])
    assert (total([answer]).num_drafts > 0) == (length > 0)
