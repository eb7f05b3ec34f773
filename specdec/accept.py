"""The accept rules: which candidates become committed tokens. One pure function each.

*accepted* a candidate that becomes a token; *correction* the target's token at the first position where no candidate
does; *bonus* the target's token behind the last candidate of a fully accepted path.

`rejection` and `block` take a batch of blocks of one tree shape, so that their law can be tested over many draws at
once; a worker's batch is 1. Their arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.candidates import ROOT, CandidateTree
from specdec.commit import TokenSource


@dataclass(frozen=True, slots=True)
class Accepted:
    """nodes: the accepted candidates, a path from the root. token_ids: theirs and one more of the target's."""

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]


def accept_invariant(candidates: CandidateTree, target_tokens: Sequence[int]) -> Accepted:
    """Walks down the tree while a child equals the target's token. Greedy is the case of temperature 0.

    target_tokens: [1 + len(candidates)]; the first is the target's token behind the committed prefix, number 1 + i the
    one behind candidate i. The result is a function of the target's tokens alone: a drafter can waste time, but it can
    never steer the output (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    node = ROOT
    while True:
        wanted = target_tokens[1 + node]
        children = candidates.children(node)
        child = next((child for child in children if candidates.token_ids[child] == wanted), None)
        if child is None:
            return accepted_path(candidates, node, wanted)
        node = child


def accepted_path(candidates: CandidateTree, node: int, token_id: int) -> Accepted:
    """The path down to `node` was accepted, and `token_id` is the target's own behind it."""
    nodes = candidates.path(node)
    if not len(candidates):
        last = TokenSource.PLAIN
    else:
        last = TokenSource.CORRECTION if candidates.children(node) else TokenSource.BONUS
    return Accepted(
        tuple(nodes),
        (*(candidates.token_ids[i] for i in nodes), token_id),
        (*[TokenSource.ACCEPTED] * len(nodes), last),
    )


def accept_rejection(
    parents: Sequence[int],
    token_ids: Tensor,  # [batch, n], int64
    draft_ids: Tensor,  # [batch, n, M], int64: ids of each candidate's law, each once
    draft_probs: Tensor,  # [batch, n, M], float64: their probabilities; 0 pads
    target_probs: Tensor,  # [batch, 1 + n, vocab], float64: behind the prefix, and behind each candidate
    accept_uniforms: Tensor,  # [batch, n], in (0, 1)
    draw_uniforms: Tensor,  # [batch], in (0, 1)
) -> tuple[Tensor, Tensor]:
    """Tests the children of a node one after the other: accept with min(1, p / q); after a rejection the target's law
    becomes norm(max(p - q, 0)), and the next sibling's law is the one it was drawn from given that rejection. Where all
    are rejected, or none are left, the token is drawn from what is left of the target's law.

    Returns the last accepted node of each block (ROOT: none) and the token behind it, both int64 [batch].

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; trees without replacement: Jeon et al.,
    arXiv 2402.14160.
    """
    batch = torch.arange(len(token_ids))
    node = torch.full((len(token_ids),), ROOT)
    whole = torch.ones(len(token_ids), dtype=torch.float64)
    law = target_probs[:, 0].clone()  # [batch, vocab]
    for i, parent in enumerate(parents):
        tested = node == parent
        p = law[batch, token_ids[:, i]]
        q = (draft_probs[:, i] * (draft_ids[:, i] == token_ids[:, i, None])).sum(dim=-1)
        accepted = tested & (accept_uniforms[:, i] * q < p)
        rejected = tested & ~accepted
        law[rejected] = residual(whole[rejected], law[rejected], draft_ids[rejected, i], draft_probs[rejected, i])
        law[accepted] = target_probs[accepted, 1 + i]
        node = torch.where(accepted, i, node)
    return node, draw_from(law, draw_uniforms)


def accept_block(
    token_ids: Tensor,  # [batch, n], int64
    draft_ids: Tensor,  # [batch, n, M]
    draft_probs: Tensor,  # [batch, n, M], float64
    target_probs: Tensor,  # [batch, 1 + n, vocab], float64
    accept_uniforms: Tensor,  # [batch, n], in (0, 1)
    draw_uniforms: Tensor,  # [batch], in (0, 1)
) -> tuple[Tensor, Tensor]:
    """Tests the prefixes of a chain together and accepts the longest that passes, which is at least as many tokens as
    testing them one by one. Returns as `accept_rejection`.

    Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2.
    """
    count = token_ids.shape[1]
    batch = torch.arange(len(token_ids))
    node = torch.full((len(token_ids),), ROOT)
    weight = torch.ones(len(token_ids), dtype=torch.float64)  # of the prefix that is looked at
    weights = [weight]
    for i in range(count):
        p = target_probs[batch, i, token_ids[:, i]]
        q = (draft_probs[:, i] * (draft_ids[:, i] == token_ids[:, i, None])).sum(dim=-1)
        weight = torch.clamp(weight * p / q, max=1.0)
        weights.append(weight)
        if i + 1 < count:
            left = excess(weight, target_probs[:, i + 1], draft_ids[:, i + 1], draft_probs[:, i + 1]).sum(dim=-1)
            passes = left / (left + 1.0 - weight)  # 0 / 0: an impossible prefix, or one whose continuation fits exactly
            passes = torch.where(left + 1.0 - weight > 0, passes, 1.0)
        else:
            passes = weight
        node = torch.where(accept_uniforms[:, i] < passes, i, node)
    law = target_probs[batch, 1 + node].clone()
    for i in range(count):
        here = node == i - 1
        law[here] = residual(weights[i][here], target_probs[here, i], draft_ids[here, i], draft_probs[here, i])
    return node, draw_from(law, draw_uniforms)


def residual(weight: Tensor, law: Tensor, draft_ids: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(weight * p - q, 0)), [batch, vocab]; `law` itself where nothing is left, which only rounding meets: to
    draw from nothing would give a token outside the support."""
    left = excess(weight, law, draft_ids, draft_probs)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, left / mass, law)


def excess(weight: Tensor, law: Tensor, draft_ids: Tensor, draft_probs: Tensor) -> Tensor:
    """max(weight * p - q, 0), [batch, vocab], not normalised."""
    left = weight[:, None] * law
    return left.scatter_add(-1, draft_ids, -draft_probs).clamp_(min=0.0)


def draw_from(law: Tensor, draw_uniforms: Tensor) -> Tensor:
    """One token per row of `law` (float64 [batch, vocab], not normalised) by its cumulative sums; int64 [batch]."""
    sums = law.cumsum(dim=-1)
    wanted = draw_uniforms[:, None] * sums[:, -1:]
    token_ids = torch.searchsorted(sums, wanted, right=True).squeeze(-1)
    last = (law > 0).to(torch.uint8).flip(-1).argmax(dim=-1)  # rounding must not step past the support
    return torch.minimum(token_ids, law.shape[-1] - 1 - last)
