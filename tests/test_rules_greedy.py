"""Kind 2: the text is the target's own, whatever was drafted. Kind 13's acceptance figures are part of it."""

from __future__ import annotations

import pytest

from scheduler.request import GenerationRequest
from specdec.candidates import CandidateTree
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.messages import DraftBlock
from specdec.params import SamplingParams
from tools.cases import GREEDY, SAMPLED, check_all, prompts, total
from tools.continuations import LawContinuation, plain_output
from tools.deployment import Deployment, quick_config
from tools.scripted import RandomTree, Script, ScriptedDrafter, WrongFrom, oracle
from tools.table_drafter import AgreeingLaw, TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(order=1000)
"""Looks back at everything, so that any stale or missing token of the KV shows."""
TOKENS = 25
LENGTHS = [1, 2, 4, 8, 16]


def requests(sampling: SamplingParams, count: int = 8) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, sampling, max_tokens=TOKENS) for prompt in prompts(count)]


def scripted(script: Script) -> ScriptedDrafter:
    return ScriptedDrafter(script, LawContinuation(LAW))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_kind2_an_oracle_is_accepted_whole_and_needs_no_verify_too_many(
    length: int, sampling: SamplingParams
) -> None:
    async with Deployment([TableModel(LAW)], [scripted(oracle)], quick_config(length)) as system:
        answers = await check_all(system, LAW, requests(sampling))
    full, rest = divmod(TOKENS, length + 1)
    for answer in answers:
        assert answer.finished is not None
        figures = answer.finished.speculation
        assert figures.acceptance_rate == 1.0
        # The last token of a budget needs no candidate, so a rest of one is a plain step.
        assert (figures.num_drafts, figures.num_plain_steps) == (full + (rest > 1), int(rest == 1))


@pytest.mark.parametrize("length", LENGTHS)
async def test_kind2_an_anti_draft_is_never_accepted(length: int) -> None:
    """Not even the first candidate of a block of one (kind 2 number 12, kind 13 number 76)."""
    async with Deployment([TableModel(LAW)], [scripted(WrongFrom(0, 64))], quick_config(length)) as system:
        figures = total(await check_all(system, LAW, [*requests(SAMPLED, 4), *requests(GREEDY, 4)]))
    assert figures.num_accepted_tokens == 0
    assert figures.num_drafts == 8 * (TOKENS - 1)


@pytest.mark.parametrize("wrong_at", range(8))
async def test_kind2_a_half_draft_is_accepted_up_to_its_wrong_position(wrong_at: int) -> None:
    async with Deployment([TableModel(LAW)], [scripted(WrongFrom(wrong_at, 64))], quick_config(8)) as system:
        answers = await check_all(system, LAW, requests(SAMPLED, 4))
    for answer in answers:
        assert answer.finished is not None
        per_position = answer.finished.speculation.num_accepted_tokens_per_position
        full = TOKENS // (wrong_at + 1)
        assert len(per_position) == wrong_at
        assert all(count >= full - 1 for count in per_position)


def off_the_first_branch(tree: CandidateTree, token_ids: list[int]) -> int:
    """Nodes on the path that spells as much of `token_ids` as the tree holds, other than their parent's first child."""
    path: list[int] = []
    while (node := tree.walk(token_ids[: len(path) + 1])) is not None and len(path) < len(token_ids):
        path.append(node)
    parents = [-1, *path]
    return sum(node != tree.children(parent)[0] for parent, node in zip(parents, path, strict=False))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
async def test_kind2_trees_are_walked_down_whichever_branch_is_right(width: int, sampling: SamplingParams) -> None:
    async with Deployment([TableModel(LAW)], [scripted(RandomTree(width, 64))], quick_config(5)) as system:
        answers = await check_all(system, LAW, requests(sampling))
        results = system.drafts[0].results
        blocks = [(r.header.base_length, r.body.candidates) for r in results if isinstance(r.body, DraftBlock)]
    figures = total(answers)
    # Two rounds in three tokens at least: every block held the whole right path.
    assert figures.num_drafts + figures.num_plain_steps == 8 * -(-TOKENS // 6)
    other_branches = 0
    for request in requests(sampling):
        log = [*request.token_ids, *plain_output(LAW, request.token_ids, sampling, TOKENS)]
        other_branches += sum(off_the_first_branch(tree, log[base:]) for base, tree in blocks if base < len(log))
    assert (other_branches >= 20) == (width > 1)


@pytest.mark.parametrize("length", [1, 4, 16])
@pytest.mark.parametrize(
    "drafter",
    [
        lambda: TableDrafter(LAW, 0.7),
        lambda: ModelDrafter(TableModel(AgreeingLaw(LAW, 0.7))),
        lambda: NgramDrafter(1, 3),
    ],
    ids=["table", "model", "ngram"],
)
async def test_kind2_the_draft_length_changes_no_token(drafter: type[Drafter], length: int) -> None:
    """Drafters of the usual kind: sometimes right. Kind 2 number 14: sweep the draft length."""
    async with Deployment([TableModel(LAW)], [drafter()], quick_config(length, width=2)) as system:
        figures = total(await check_all(system, LAW, [*requests(SAMPLED, 4), *requests(GREEDY, 4)]))
        await system.idle()
        system.models[0].check_integrity()
    assert figures.num_drafts > 0


async def test_kind13_a_drafter_with_kv_accepts_what_one_without_kv_does() -> None:
    """Number 75: after a rejection the drafter's KV is rolled back, not lost and not kept."""
    figures = []
    for drafter in (TableDrafter(LAW, 0.7), ModelDrafter(TableModel(AgreeingLaw(LAW, 0.7)))):
        async with Deployment([TableModel(LAW)], [drafter], quick_config(5)) as system:
            figures.append(total(await check_all(system, LAW, requests(SAMPLED))))
    assert figures[0] == figures[1]
    assert 0.2 < (figures[0].acceptance_rate or 0.0) < 0.9
