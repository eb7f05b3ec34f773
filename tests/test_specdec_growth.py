"""What a model drafter proposes: combs of the likeliest siblings, how sure it is, and where it stops for doubt."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from specdec.candidates import ROOT, CandidateTree
from specdec.digest import root_digest
from specdec.drafter import DraftJob
from specdec.drafters.growth import Growth
from specdec.drafters.model import ModelDrafter
from specdec.law import Law
from specdec.log import Log
from specdec.params import AcceptRule, SamplingParams, StopConditions
from specdec.rates import Certainty
from specdec.sampling import DegenerateLogits
from tools.table_law import TableLaw
from tools.table_model import TableModel

LAW = TableLaw(vocabulary_size=12)
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, seed=4)


def _job(sampling: SamplingParams, length: int = 4, width: int = 1, min_confidence: float = 0.0) -> DraftJob:
    log = Log(root_digest(b"", "test"), [1, 2, 3])
    return DraftJob("s", log, sampling, StopConditions(3, 200), length, width, min_confidence=min_confidence)


def _draft(job: DraftJob) -> CandidateTree:
    [tree] = ModelDrafter(TableModel(LAW)).draft([job])
    return tree


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_siblings_are_what_the_target_would_draw_next_likeliest(sampling: SamplingParams) -> None:
    job = _job(sampling, width=3)
    tree = _draft(job)
    assert (tree.draft_length, len(tree)) == (4, 12)
    spine: list[int] = []
    node = ROOT
    for _ in range(4):
        logits = torch.tensor(LAW.logits([*job.log.token_ids, *spine]))[None]
        scores = Law(sampling, job.stop, job.log.token_ids).scores(logits, [spine])[0]
        children = tree.children(node)
        assert [tree.token_ids[child] for child in children] == scores.argsort(descending=True)[:3].tolist()
        node = children[0]
        spine.append(tree.token_ids[node])
    assert spine == list(_draft(replace(job, width=1)).token_ids)


def test_confidence_is_that_in_the_first_of_the_two_likeliest() -> None:
    tree = _draft(_job(GREEDY, length=1))
    best = torch.tensor(LAW.logits([1, 2, 3])).topk(2).values
    assert tree.confidences == pytest.approx((1 / (1 + math.exp(float(best[1] - best[0]))),))
    assert tree.certainty == pytest.approx(tree.confidences[0])


@pytest.mark.parametrize("rule", [AcceptRule.INVARIANT, AcceptRule.REJECTION])
def test_it_stops_behind_the_candidate_that_it_doubts(rule: AcceptRule) -> None:
    sampling = replace(SAMPLED, accept_rule=rule)
    whole = _draft(_job(sampling, length=12))
    certainty = [math.prod(whole.confidences[: i + 1]) for i in range(12)]
    between = (certainty[4] + certainty[5]) / 2
    assert _draft(_job(sampling, length=12, min_confidence=between)).token_ids == whole.token_ids[:6]
    assert _draft(_job(sampling, length=12, min_confidence=certainty[-1] / 2)) == whole


def test_own_draws_are_without_replacement_from_the_laws_that_are_sent() -> None:
    """Under `rejection`: the second of two siblings is drawn from the first one's law without the first."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0]])
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(3000):
        job = _job(SamplingParams(temperature=1.0, seed=seed, accept_rule=AcceptRule.REJECTION), 1, 2)
        growth = Growth.of(job)
        growth.extend(logits)
        tree = growth.tree()
        assert tree.laws[1] == tree.laws[0].without(tree.token_ids[0])
        pairs[tree.token_ids] += 1
    probs = torch.softmax(logits[0].double(), 0).tolist()
    for (first, second), count in pairs.items():
        expected = probs[first] * probs[second] / (1 - probs[first])
        assert count / 3000 == pytest.approx(expected, abs=4.5 * math.sqrt(expected / 3000))
    assert len(pairs) == 12


def test_a_row_of_nothing_fails_and_is_no_candidate() -> None:
    growth = Growth.of(_job(GREEDY))
    with pytest.raises(DegenerateLogits):
        growth.extend(torch.full((1, 4), torch.nan))
    assert len(growth.tree()) == 0


def test_certainty_learns_what_confidence_means() -> None:
    """A drafter twice as unsure as it should be, in log odds: its confidence c is right c ** 0.5 of the time."""
    certainty = Certainty()
    known_at_first = certainty.known
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        confidence = 0.64
        certainty.observe(confidence, bool(torch.rand((), generator=generator) < 0.8))
    assert (known_at_first, certainty.known) == (False, True)
    assert certainty.exponent == pytest.approx(0.5, abs=0.15)
    assert certainty.threshold(0.8) == pytest.approx(0.64, abs=0.08)


@pytest.mark.parametrize("width", [1, 3, 5])
def test_looking_for_candidates_leaves_the_models_row_as_it_was(width: int) -> None:
    """Equal logits and forbidden tokens among the highest too, where one place is looked at twice."""
    logits = torch.tensor([[2.0, -torch.inf, 2.0, -torch.inf, 1.0, -torch.inf]])
    before = logits.clone()
    growth = Growth.of(_job(GREEDY, width=width))
    growth.extend(logits)
    assert torch.equal(logits, before)
    assert growth.tree().token_ids == (0, 2, 4)[:width]
