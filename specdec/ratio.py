"""The rules that test ratios, for one sequence: a drafter's sparse law, and the step from a block to its outcome."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.accept import Accepted, accept_block, accept_rejection, accepted_path
from specdec.candidates import ROOT, CandidateTree, DraftLaw
from specdec.noise import Domain, uniforms
from specdec.params import AcceptRule
from specdec.sampling import NOTHING

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
    rule: AcceptRule,
    candidates: CandidateTree,
    target_probs: Tensor,
    seed: int,
    base_length: int,
    bad_rows: Collection[int] = (),
) -> Accepted:
    """Applies `rejection` or `block` to one block on top of `base_length` tokens.

    target_probs: [1 + len(candidates), vocab]. Every candidate has its law. bad_rows: rows that leave nothing to draw,
    not the first; what stands there in `target_probs` is not looked at. Where such a row is come to, the path down to
    it is accepted, with no token behind it.
    """
    probs = target_probs.double()
    probs = probs / probs.sum(dim=-1, keepdim=True)
    count = len(candidates)
    accept_uniforms = uniforms(seed, Domain.ACCEPT, base_length, count)[None]
    draw_uniforms = uniforms(seed, Domain.RESIDUAL, base_length, 1)
    token_ids = torch.tensor(candidates.token_ids, dtype=torch.long)[None]
    draft_ids, draft_probs = dense_laws(candidates)
    laws = (draft_ids[None], draft_probs[None], probs[None], accept_uniforms, draw_uniforms)
    node, token_id = accept_above(rule, bad_rows, candidates.parents, token_ids, *laws)
    accepted = accepted_path(candidates, int(node), int(token_id))
    if int(token_id) != NOTHING:
        return accepted
    return replace(accepted, token_ids=accepted.token_ids[:-1], sources=accepted.sources[:-1])


def accept_above(
    rule: AcceptRule,
    bad_rows: Collection[int],
    parents: Sequence[int],
    token_ids: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """`accept_rejection` or `accept_block` (which see) of what can be judged without `bad_rows`. The token is NOTHING
    where the last accepted node has such a row.

    Candidates below a bad row are cut off, as if they had never been drafted: of `block` so much of the chain is left
    as lies in front of the first such row. This keeps the law, since whether a candidate is cut depends on the tokens
    before it alone. The candidate in front of a bad row stays, and must: that the row behind it is bad is a property of
    its own value, and to drop it for that would make it rarer. For `block` this is a block that ends there, and a block
    may end at any prefix: that a prefix is accepted as often as its weight says, on which the next shorter one relies,
    holds at an end as before one. Only its last row may then be bad, from which nothing but a bonus would be drawn.
    """
    if not bad_rows:
        return _accept(rule, parents, token_ids, draft_ids, draft_probs, target_probs, accept_uniforms, draw_uniforms)
    kept: list[int] = []
    for i, parent in enumerate(parents):
        if parent == ROOT or (parent in kept and 1 + parent not in bad_rows):
            kept.append(i)
    node, token_id = _accept(
        rule,
        [parent if parent == ROOT else kept.index(parent) for parent in (parents[i] for i in kept)],
        token_ids[:, kept],
        draft_ids[:, kept],
        draft_probs[:, kept],
        target_probs[:, [0, *(1 + i for i in kept)]],
        accept_uniforms[:, kept],
        draw_uniforms,
    )
    node = torch.tensor([*kept, ROOT])[node]  # ROOT is -1: the last
    is_bad = torch.isin(1 + node, torch.tensor(list(bad_rows)))
    return node, torch.where(is_bad, NOTHING, token_id)


def _accept(
    rule: AcceptRule, parents: Sequence[int], token_ids: Tensor, *laws_and_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    if rule is AcceptRule.BLOCK:
        return accept_block(token_ids, *laws_and_uniforms)
    return accept_rejection(parents, token_ids, *laws_and_uniforms)


def dense_laws(candidates: CandidateTree) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) of the candidates' laws, both [n, M]; padded with id 0 at probability 0."""
    width = max((len(law.token_ids) for law in candidates.laws), default=1)
    ids = torch.zeros(len(candidates), width, dtype=torch.long)
    probs = torch.zeros(len(candidates), width, dtype=torch.float64)
    for i, law in enumerate(candidates.laws):
        ids[i, : len(law.token_ids)] = torch.tensor(law.token_ids)
        probs[i, : len(law.weights)] = torch.tensor(law.weights, dtype=torch.float64) / sum(law.weights)
    return ids, probs
