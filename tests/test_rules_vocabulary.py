"""Kind 7: drafters of another vocabulary are kept out; padding is no difference and never comes out."""

from __future__ import annotations

import pytest

from scheduler.request import GenerationRequest, Speculation
from specdec.commit import TokenSource
from specdec.drafters.model import ModelDrafter
from tools.cases import GREEDY, SAMPLED, check_all, prompts, total
from tools.continuations import LawContinuation
from tools.deployment import Deployment, DraftSpec, quick_config
from tools.identities import draft_identity, words
from tools.scripted import ScriptedDrafter, Spoiled, oracle
from tools.table_drafter import AgreeingLaw
from tools.table_law import TableLaw
from tools.table_model import TableModel
from tools.waiting import until

LAW = TableLaw(vocabulary_size=60, padding=68)
"""Of 128 columns 60 are real ids, and the padding scores highest."""


def requests(count: int = 20) -> list[GenerationRequest]:
    half = [GenerationRequest(prompt, GREEDY, max_tokens=12) for prompt in prompts(count // 2, 60)]
    return half + [GenerationRequest(prompt, SAMPLED, max_tokens=12) for prompt in prompts(count // 2, 60, seed=1)]


def swapped(vocabulary: list[str]) -> list[str]:
    vocabulary[3], vocabulary[4] = vocabulary[4], vocabulary[3]
    return vocabulary


@pytest.mark.parametrize(
    "vocabulary",
    [swapped(words(60)), words(59), words(61), [word.upper() for word in words(60)]],
    ids=["two swapped", "one fewer", "one more", "other words"],
)
async def test_kind7_a_foreign_vocabulary_is_kept_out_with_both_names(vocabulary: list[str]) -> None:
    """Numbers 40, 43, 44: the content of ids is compared, not only their number."""
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    spec = DraftSpec(drafter, draft_identity("foreign", vocabulary))
    async with Deployment([TableModel(LAW)], [spec]) as system:
        await until(lambda: is_state(system, "draft-0", "refused"), "refused")
        (view,) = [view for view in await system.scheduler.workers() if view.address == "draft-0"]
        assert "table-draft" in view.detail
        assert "model table " in view.detail
        assert "first differing id" in view.detail
        figures = total(await check_all(system, LAW, requests()))
        assert figures.num_drafts == 0
        assert system.drafts[0].items == []


async def is_state(system: Deployment, address: str, state: str) -> bool:
    return await system.state_of(address) == state


async def test_kind7_a_refused_drafter_is_looked_at_again_when_a_target_comes() -> None:
    """Start order does not matter: the target that it fits may come last."""
    other = TableLaw(vocabulary_size=48)
    drafter = ScriptedDrafter(oracle, LawContinuation(other))
    async with Deployment([TableModel(LAW)], [DraftSpec(drafter, draft_identity("late", words(48)))]) as system:
        await until(lambda: is_state(system, "draft-0", "refused"), "refused")
        endpoint = system.add_target(TableModel(other, name="other"))
        system.scheduler.add_worker(endpoint.worker.identity.role, endpoint.address)
        await until(lambda: is_state(system, "draft-0", "ready"), "taken back")
        request = GenerationRequest((1, 2), GREEDY, model="other", max_tokens=10)
        assert total(await check_all(system, other, [request])).num_drafts > 0
        # It fits one target, and is not used for the other.
        request = GenerationRequest((1, 2), GREEDY, model="table", max_tokens=10)
        assert total(await check_all(system, LAW, [request])).num_drafts == 0


@pytest.mark.parametrize("padding", [0, 4, 68])
async def test_kind7_padding_is_no_difference(padding: int) -> None:
    """Numbers 41, 42: a target padded to 128 columns with drafters of other paddings."""
    drafter = ModelDrafter(TableModel(AgreeingLaw(TableLaw(60, padding=padding), 0.8)))
    async with Deployment([TableModel(LAW)], [DraftSpec(drafter, draft_identity("d", words(60)))]) as system:
        answers = await check_all(system, LAW, requests())
    assert all(token_id < 60 for answer in answers for token_id in answer.token_ids)
    assert (total(answers).acceptance_rate or 0.0) > 0.4


@pytest.mark.parametrize("token_id", [60, 100, 127])
async def test_kind7_a_candidate_in_the_padding_is_rejected_and_counted(token_id: int) -> None:
    drafter = ScriptedDrafter(Spoiled(token_id, position=1), LawContinuation(LAW))
    config = quick_config()
    async with Deployment([TableModel(LAW)], [drafter], config) as system:
        request = GenerationRequest((5, 6, 7), SAMPLED, max_tokens=12, speculation=Speculation.ON)
        (answer,) = await check_all(system, LAW, [request])
    assert TokenSource.PLAIN in answer.sources
    assert total([answer]).fallbacks.get("failed", 0) >= 1
