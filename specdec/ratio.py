"""The rules that test ratios, for one sequence: a drafter's sparse law, and the step from a block to its outcome."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.accept import Accepted, accept_block, accept_rejection, accepted_path
from specdec.candidates import CandidateTree, DraftLaw
from specdec.noise import Domain, uniforms
from specdec.params import AcceptRule

TOP_TOKENS = 64
"""Tokens of a draft law at most: a few hundred bytes on the wire instead of the vocabulary."""
TOTAL_WEIGHT = 2**20


def quantised(probs: Tensor, top_tokens: int = TOP_TOKENS) -> DraftLaw:
    """The law that a drafter draws from and sends: the top tokens of `probs` [vocab] with integer weights."""
    top, token_ids = torch.topk(probs.double(), min(top_tokens, probs.shape[-1]))
    weights = (top / top.sum() * TOTAL_WEIGHT).round().long().clamp_(min=1)[top > 0]
    return DraftLaw(tuple(token_ids[top > 0].tolist()), tuple(weights.tolist()))


def draw_candidate(law: DraftLaw, uniform: float) -> int:
    """A token of `law` by its cumulative weights."""
    left = int(uniform * sum(law.weights))
    for token_id, weight in zip(law.token_ids, law.weights, strict=True):
        if left < weight:
            return token_id
        left -= weight
    return law.token_ids[-1]


def accept_ratio(
    rule: AcceptRule, candidates: CandidateTree, target_probs: Tensor, seed: int, base_length: int
) -> Accepted:
    """Applies `rejection` or `block` to one block on top of `base_length` tokens.

    target_probs: [1 + len(candidates), vocab]. Every candidate has its law.
    """
    probs = target_probs.double()
    probs = probs / probs.sum(dim=-1, keepdim=True)
    count = len(candidates)
    accept_uniforms = uniforms(seed, Domain.ACCEPT, base_length, count)[None]
    draw_uniforms = uniforms(seed, Domain.RESIDUAL, base_length, 1)
    token_ids = torch.tensor(candidates.token_ids, dtype=torch.long)[None]
    draft_ids, draft_probs = dense_laws(candidates)
    laws = (draft_ids[None], draft_probs[None], probs[None], accept_uniforms, draw_uniforms)
    if rule is AcceptRule.BLOCK:
        node, token_id = accept_block(token_ids, *laws)
    else:
        node, token_id = accept_rejection(candidates.parents, token_ids, *laws)
    return accepted_path(candidates, int(node), int(token_id))


def dense_laws(candidates: CandidateTree) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) of the candidates' laws, both [n, M]; padded with id 0 at probability 0."""
    width = max((len(law.token_ids) for law in candidates.laws), default=1)
    ids = torch.zeros(len(candidates), width, dtype=torch.long)
    probs = torch.zeros(len(candidates), width, dtype=torch.float64)
    for i, law in enumerate(candidates.laws):
        ids[i, : len(law.token_ids)] = torch.tensor(law.token_ids)
        probs[i, : len(law.weights)] = torch.tensor(law.weights, dtype=torch.float64) / sum(law.weights)
    return ids, probs
