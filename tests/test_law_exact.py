"""The output of `rejection` and `block` has exactly the target's law, by enumeration in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from specdec import accept, ratio
from specdec.candidates import ROOT, CandidateTree, DraftLaw
from specdec.params import AcceptRule
from tools.law_exact import ExactCase, ExactLaw

TOLERANCE = 1e-12

CHAINS = [(-1,), (-1, 0), (-1, 0, 1)]
TREES = {
    "two": (-1, -1),
    "three": (-1, -1, -1),
    "two levels": (-1, -1, 0, 0),
    "second branch": (-1, -1, 1, 1),
    "child before sibling": (-1, 0, -1, 2),
    "chain below each": (-1, -1, 0, 1),
}


def rejection(
    parents: Sequence[int], token_ids: Tensor, ids: Tensor, probs: Tensor, target: Tensor, tests: Tensor, draw: Tensor
) -> tuple[Tensor, Tensor]:
    return accept.accept_rejection(parents, token_ids, ids, probs, target, tests, draw)


def block(
    parents: Sequence[int], token_ids: Tensor, ids: Tensor, probs: Tensor, target: Tensor, tests: Tensor, draw: Tensor
) -> tuple[Tensor, Tensor]:
    return accept.accept_block(token_ids, ids, probs, target, tests, draw)


def check_rejection(case: ExactCase) -> None:
    difference = ExactLaw(rejection, case).worst_difference()
    assert difference < TOLERANCE, f"law differs by {difference:.2g}"


def check_block(case: ExactCase) -> None:
    difference = ExactLaw(block, case).worst_difference()
    assert difference < TOLERANCE, f"law differs by {difference:.2g}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parents", CHAINS, ids=len)
def test_rejection_of_chains_is_exact(parents: tuple[int, ...], seed: int) -> None:
    check_rejection(ExactCase(parents, 4, seed))


@pytest.mark.parametrize("replaced", [False, True], ids=["without replacement", "independent laws, duplicates"])
@pytest.mark.parametrize("shape", TREES)
def test_rejection_of_trees_is_exact(shape: str, replaced: bool) -> None:
    case = ExactCase(TREES[shape], 3, 11, replaced)
    siblings = [[tree.token_ids[i] for i in tree.children(ROOT)] for tree, _ in case.drafts]
    twins = [len(set(tokens)) < len(tokens) for tokens in siblings]
    assert any(twins) == replaced
    check_rejection(case)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parents", CHAINS, ids=len)
def test_block_is_exact(parents: tuple[int, ...], seed: int) -> None:
    check_block(ExactCase(parents, 4, seed))


def test_block_is_exact_on_one_case() -> None:
    check_block(ExactCase((-1, 0, 1), 4, 0))


def test_block_accepts_at_least_as_many_as_rejection() -> None:
    gains = []
    for seed in range(3):
        for parents in CHAINS:
            case = ExactCase(parents, 3, 100 + seed)
            gains.append(ExactLaw(block, case).mean_accepted - ExactLaw(rejection, case).mean_accepted)
    assert min(gains) > -TOLERANCE
    assert max(gains) > 0.01  # and not because they are one


def test_block_of_the_papers_example_accepts_eleven_ninths() -> None:
    """Sun et al., section 2: target (1/3, 2/3), draft (2/3, 1/3), two candidates: 10/9 token by token, 11/9 as a
    block."""

    class Paper(ExactCase):
        def target_law(self, path: Sequence[int]) -> Tensor:
            return torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)

        def draft_law(self, path: Sequence[int], sibling: int) -> DraftLaw:
            return DraftLaw((0, 1), (2, 1))

    case = Paper((-1, 0), 2, 0)
    assert ExactLaw(rejection, case).mean_accepted == pytest.approx(10 / 9, abs=TOLERANCE)
    assert ExactLaw(block, case).mean_accepted == pytest.approx(11 / 9, abs=TOLERANCE)
    check_rejection(case)
    check_block(case)


class Ending(ExactCase):
    """Behind token 1 the target's row is bad: plain decoding ends there, which is told by a token 0 that is certain."""

    @staticmethod
    def ends(path: Sequence[int]) -> bool:
        return 1 in path

    def target_law(self, path: Sequence[int]) -> Tensor:
        return torch.eye(self.vocabulary_size, dtype=torch.float64)[0] if self.ends(path) else super().target_law(path)


def judged_to_the_end(
    rule: AcceptRule, parents: Sequence[int], token_ids: Tensor, *laws: Tensor
) -> tuple[Tensor, Tensor]:
    """What the target worker calls, for each draft with the rows that are bad in it."""
    node, token_id = torch.empty(len(token_ids), dtype=torch.long), torch.empty(len(token_ids), dtype=torch.long)
    tree = CandidateTree((0,) * len(parents), tuple(parents))
    bad = torch.stack([(token_ids[:, tree.path(i)] == 1).any(dim=-1) for i in range(len(tree))], dim=-1)
    for pattern in {tuple(flags) for flags in bad.tolist()}:
        rows = (bad == torch.tensor(pattern)).all(dim=-1)
        bad_rows = [1 + i for i, is_bad in enumerate(pattern) if is_bad]
        spoiled = [part[rows].clone() for part in laws]
        spoiled[2][:, bad_rows] = torch.nan
        node[rows], token_id[rows] = ratio.accept_above(rule, bad_rows, parents, token_ids[rows], *spoiled)
    return node, token_id.clamp(min=0)


@pytest.mark.parametrize(
    ("rule", "parents"),
    [(AcceptRule.BLOCK, (-1, 0, 1)), (AcceptRule.REJECTION, (-1, -1, 0))],
    ids=["block", "rejection of a tree"],
)
def test_rows_from_which_nothing_can_be_drawn_end_as_many_answers_as_plainly(
    rule: AcceptRule, parents: tuple[int, ...]
) -> None:
    case = Ending(parents, 3, 4)
    assert float(case.target_law(())[1]) > 0.05
    law = ExactLaw(partial(judged_to_the_end, rule), case)
    assert law.worst_difference() < TOLERANCE
    assert law.mean_accepted > 0.2


@pytest.mark.parametrize("parents", CHAINS, ids=len)
def test_a_drafter_that_is_the_target_is_always_accepted(parents: tuple[int, ...]) -> None:
    class Same(ExactCase):
        def target_law(self, path: Sequence[int]) -> Tensor:
            law = self.draft_law(path, 0)
            probs = torch.zeros(self.vocabulary_size, dtype=torch.float64)
            probs[list(law.token_ids)] = torch.tensor(law.weights, dtype=torch.float64)
            return probs / sum(law.weights)

    case = Same(parents, 4, 5)
    for rule in (rejection, block):
        law = ExactLaw(rule, case)
        assert law.mean_accepted == pytest.approx(len(parents), abs=TOLERANCE)
        assert law.worst_difference() < TOLERANCE


def test_nothing_impossible_is_drawn_where_rounding_leaves_no_residual() -> None:
    """Target and draft agree up to the last bit, and the uniforms are as unlucky as they can be."""
    ids = torch.arange(3)[None, None].repeat(1, 2, 1)
    draft = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64)[None, None].repeat(1, 2, 1)
    target = torch.tensor([0.3 - 2**-54, 0.7, 0.0], dtype=torch.float64)[None, None].repeat(1, 3, 1)
    unlucky = torch.full((1, 2), 1 - 2**-54, dtype=torch.float64)
    for rule in (rejection, block):
        for token_ids in ([0, 0], [0, 1], [1, 0]):
            tokens = torch.tensor([token_ids])
            for uniform in (1e-16, 0.5, 1 - 1e-16):
                _, token_id = rule((-1, 0), tokens, ids, draft, target, unlucky, torch.tensor([uniform]).double())
                assert int(token_id) != 2
