"""A row from which nothing can be drawn ends a sequence where plain decoding would come to stand at it, and only there.
Under every accept rule, and whatever was drafted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from scheduler.errors import SequenceFailed
from scheduler.request import GenerationRequest, Speculation, Tokens
from specdec.candidates import CandidateTree, DraftLaw
from specdec.drafter import DraftJob
from specdec.engine.model import Segment
from specdec.law import Law
from specdec.params import NO_REPORT, AcceptRule, SamplingParams, StopConditions
from specdec.sampling import DegenerateLogits
from target_worker.decide import Decision, decide
from tools.cases import SAMPLED, check_all
from tools.continuations import LawContinuation
from tools.deployment import Deployment
from tools.scripted import ScriptedDrafter
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel

RULES = list(AcceptRule)
LAW = TableLaw()
FORBIDDEN = 7
"""A token that the target never says, since a bias is against it."""
BAD = pytest.mark.parametrize("bad", [torch.nan, -torch.inf], ids=["nan", "-inf"])


def judged(rule: AcceptRule, candidates: CandidateTree, logits: torch.Tensor, seed: int = 5) -> Decision:
    """Of a request that forbids token 0; the log has 3 tokens."""
    params = SamplingParams(1.0, seed=seed, accept_rule=rule, logit_bias=((0, -100.0),))
    law = Law(params, StopConditions(1, 100), [1, 2, 3])
    return decide(law, candidates, logits, 3, 100, NO_REPORT)


def certain(token_ids: Sequence[int], parents: Sequence[int]) -> CandidateTree:
    return CandidateTree(tuple(token_ids), tuple(parents), tuple(DraftLaw.certain(token_id) for token_id in token_ids))


@BAD
@pytest.mark.parametrize("rule", RULES)
def test_a_row_behind_a_rejected_candidate_is_not_looked_at(rule: AcceptRule, bad: float) -> None:
    """Nor one below it; the tokens are those of the same block without a bad row."""
    candidates = certain((0, 2, 2), (-1, 0, 1))
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    good = judged(rule, candidates, logits)
    logits[1:3] = bad
    assert judged(rule, candidates, logits) == good
    assert len(good.committed.token_ids) == 1


@pytest.mark.parametrize("rule", [AcceptRule.INVARIANT, AcceptRule.REJECTION])
def test_a_bad_branch_does_not_harm_its_sibling(rule: AcceptRule) -> None:
    candidates = certain((0, 3, 4, 3), (-1, 0, -1, 2))
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    logits[[0, 3], [4, 3]] = 200.0  # what the target says: 4, 3
    logits[[1, 2]] = torch.nan
    decision = judged(rule, candidates, logits)
    assert (decision.nodes, decision.committed.token_ids[:2]) == ((2, 3), (4, 3))
    assert not decision.at_bad_row


@BAD
@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_come_to_ends_the_block_and_the_next_step_fails(rule: AcceptRule, bad: float) -> None:
    candidates = certain((4, 3, 2), (-1, 0, 1))
    logits = torch.zeros(4, 6)
    logits[[0, 1], [4, 3]] = 200.0
    logits[2] = bad
    decision = judged(rule, candidates, logits)
    assert (decision.committed.token_ids, decision.at_bad_row) == ((4, 3), True)
    assert decision.nodes == (0,)  # the last token has no KV, as ever
    with pytest.raises(DegenerateLogits):
        judged(rule, certain((1,), (-1,)), logits[2:])


class BadBehind(TableModel):
    """NaN in each row behind a candidate that is `FORBIDDEN`."""

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        logits = super().forward(segments)
        for segment, rows in zip(segments, logits, strict=True):
            for i, token_id in enumerate(segment.token_ids[len(segment.token_ids) - len(rows) :]):
                if token_id == FORBIDDEN:
                    rows[i] = torch.nan
        return logits


def forbidden_first(job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
    return certain((FORBIDDEN, *continuation[: job.draft_length - 1]), range(-1, job.draft_length - 1))


@pytest.mark.parametrize("rule", RULES)
async def test_drafts_that_lead_to_bad_rows_end_no_answer(rule: AcceptRule) -> None:
    sampling = replace(SAMPLED, accept_rule=rule, logit_bias=((FORBIDDEN, -100.0),))
    async with Deployment([BadBehind(LAW)], [ScriptedDrafter(forbidden_first, LawContinuation(LAW))]) as system:
        answer = await system.generate(GenerationRequest((1, 2, 3), sampling, max_tokens=20))
        await system.idle()
    assert len(answer.token_ids) == 20
    assert answer.finished
    assert answer.finished.speculation.num_drafts > 5
    assert answer.finished.speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("speculation", [Speculation.ON, Speculation.OFF])
@pytest.mark.parametrize("kind", [FaultKind.NAN, FaultKind.INFINITE])
@pytest.mark.parametrize("rule", RULES)
async def test_an_answer_comes_to_its_bad_row_and_its_neighbours_to_their_ends(
    rule: AcceptRule, kind: FaultKind, speculation: Speculation
) -> None:
    """Nothing but its own answer ends there; those beside it, in the same forwards, are what they are alone."""
    model = TableModel(LAW, faults=[Fault(kind, marker=63, from_length=3 + 6)])
    sampling = replace(SAMPLED, accept_rule=rule)
    async with Deployment([model], [TableDrafter(LAW, 0.9)]) as system:
        request = GenerationRequest((63, 2, 3), sampling, max_tokens=30, speculation=speculation)
        bad = asyncio.create_task(told_before_the_failure(system, request))
        of_its_rule = asyncio.create_task(system.generate(replace(request, token_ids=(1, 2, 3), max_tokens=12)))
        await check_all(system, LAW, [GenerationRequest((i, 5, 3), SAMPLED, max_tokens=12) for i in range(4)])
        assert await bad == 6
        assert len((await of_its_rule).token_ids) == 12
        await system.idle()
        model.check_integrity()


async def told_before_the_failure(system: Deployment, request: GenerationRequest) -> int:
    count = 0
    with pytest.raises(SequenceFailed):
        async for event in system.scheduler.generate(request):
            count += len(event.token_ids) if isinstance(event, Tokens) else 0
    return count
