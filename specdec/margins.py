"""By how much a token won, and what numeric noise could have made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import sampling
from specdec.law import Law, Path
from specdec.params import SamplingParams


def margins(law: Law, logits: Tensor, paths: Sequence[Path], token_ids: Sequence[int], noise: float) -> list[float]:
    """Of each row of `logits` [rows, vocab], whose token was drawn under the shared noise: in logits when greedy, in
    log p + g else, against the best other token. Infinite where there is none.

    noise: by how much the gap of two tempered logits may move with what shares a forward. At the edge of a filter
    (top-k, top-p, min-p, typical-p) noise lets tokens in or out, whatever they score. So a token that it might let in
    counts as another one, and one that it might let out has won by nothing.
    """
    if noise == 0.0 or law.params.temperature == 0.0 or not _filters(law.params):
        return [best[0][1] - best[1][1] if len(best) > 1 else math.inf for best in law.likeliest(logits, paths, 2)]
    with law.edited(logits, paths) as edited:
        tempered = edited.float() / law.params.temperature
    certain, possible = filter_bounds(tempered, law.params, noise)
    won: list[float] = []
    for row, (path, token_id) in enumerate(zip(paths, token_ids, strict=True)):
        probs = torch.softmax(tempered[row], dim=-1)
        scores = torch.log(sampling.perturbed(probs, law.params.seed, law.position(path)))
        others = possible[row].clone()
        others[token_id] = False
        best_other = scores.masked_fill(~others, -torch.inf).max()
        won.append(max(0.0, float(scores[token_id] - best_other)) if certain[row, token_id] else 0.0)
    return won


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0


def filter_bounds(scores: Tensor, params: SamplingParams, noise: float) -> tuple[Tensor, Tensor]:
    """Which tokens the filters keep whatever noise does, and which they may keep: bool [rows, vocab] each. scores:
    tempered logits [rows, vocab], of which the gap of any two moves by up to `noise`. Under typical-p, whose order
    follows the entropy, nothing is certain."""
    scores = scores.double()
    possible = scores > -torch.inf
    certain = possible.clone()
    if params.top_k > 0:
        certain &= _mass_from(scores, scores - noise, possible.double()) <= params.top_k
        possible &= _mass_above(scores, scores + noise, possible.double()) < params.top_k
        certain &= possible
    if params.top_p < 1.0:
        certain, possible = _top_p_bounds(scores, certain, possible, params.top_p, noise)
    if params.min_p > 0.0:
        least = scores.max(dim=-1, keepdim=True).values + math.log(params.min_p)
        certain &= scores - noise >= least
        possible &= scores + noise >= least
    if params.typical_p < 1.0:
        certain = torch.zeros_like(certain)
    return certain, possible


def _top_p_bounds(
    scores: Tensor, certain: Tensor, possible: Tensor, top_p: float, noise: float
) -> tuple[Tensor, Tensor]:
    """A token stays if the share of what is before it is below `top_p`. Before it are at least the certain tokens that
    lead it by more than noise, at most the possible ones that it does not; and noise may weigh them by `e^noise`
    against the rest."""
    probs = torch.softmax(scores, dim=-1)
    of_certain, of_possible = probs * certain, probs * possible
    before = _mass_above(scores, scores + noise, of_certain)
    rest = of_possible.sum(dim=-1, keepdim=True) - before
    may_stay = before * math.exp(-noise) < top_p * (before * math.exp(-noise) + rest)
    before = _mass_from(scores, scores - noise, of_possible) - of_possible
    rest = of_certain.sum(dim=-1, keepdim=True) - _mass_from(scores, scores - noise, of_certain) + of_certain
    stays = before * math.exp(noise) < top_p * (before * math.exp(noise) + rest)
    return certain & stays, possible & may_stay


def _mass_above(scores: Tensor, bounds: Tensor, weights: Tensor) -> Tensor:
    """Sum of the weights of the tokens that score above each bound; all [rows, vocab]."""
    return _mass_of_the_last(scores, weights, right=True, bounds=bounds)


def _mass_from(scores: Tensor, bounds: Tensor, weights: Tensor) -> Tensor:
    """Sum of the weights of the tokens that score at least each bound; all [rows, vocab]."""
    return _mass_of_the_last(scores, weights, right=False, bounds=bounds)


def _mass_of_the_last(scores: Tensor, weights: Tensor, *, right: bool, bounds: Tensor) -> Tensor:
    ascending, order = torch.sort(scores, dim=-1)
    sums = torch.nn.functional.pad(weights.gather(-1, order).cumsum(dim=-1), (1, 0))  # [rows, 1 + vocab]
    return sums[:, -1:] - sums.gather(-1, torch.searchsorted(ascending, bounds.contiguous(), right=right))
