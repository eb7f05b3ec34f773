"""From logits to the next token: the processed law, and the draw with shared noise.

Target and drafter use the same functions with the same parameters; only then do they agree as often as their laws do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.noise import exponential
from specdec.params import SamplingParams, StopConditions

_TOP_P_SHORTLIST = 1024


class DegenerateLogits(ValueError):
    """A row of logits holds NaN, or nothing above -inf: there is no law to draw from."""


def process_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law of the next token, float32 [rows, vocab], each row summing to 1.

    logits: float [rows, vocab]. Order as in transformers: temperature, top-k, top-p, min-p. At temperature 0 all mass
    is on the highest logit (lowest id of equals).
    """
    logits = logits.float()
    highest = logits.max(dim=-1, keepdim=True).values
    if not torch.isfinite(highest).all():
        raise DegenerateLogits("logits hold NaN or no finite value")
    if params.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    scores = (logits - highest) / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        scores = _keep_top_k(scores, params.top_k)
    if params.top_p < 1.0:
        scores = _keep_top_p(scores, params.top_p)
    probs = torch.softmax(scores, dim=-1)
    if params.min_p > 0.0:
        probs = torch.where(probs < params.min_p * probs.max(dim=-1, keepdim=True).values, 0.0, probs)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def _keep_top_k(scores: Tensor, top_k: int) -> Tensor:
    """-inf below the k-th highest score; equals of it stay."""
    threshold = torch.topk(scores, top_k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < threshold, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """-inf outside the smallest set of highest scores whose mass reaches `top_p`; the highest always stays.

    Works on a shortlist, and sorts the whole vocabulary only for rows whose shortlist is short of the mass.
    """
    probs = torch.softmax(scores, dim=-1)
    size = min(_TOP_P_SHORTLIST, probs.shape[-1])
    shortlist, ids = torch.topk(probs, size, dim=-1, sorted=True)
    if size < probs.shape[-1] and bool((shortlist.sum(dim=-1) < top_p).any()):
        shortlist, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    mass_before = shortlist.cumsum(dim=-1) - shortlist
    kept = torch.full_like(scores, -torch.inf)
    kept_scores = scores.gather(-1, ids).masked_fill(mass_before >= top_p, -torch.inf)
    return kept.scatter_(-1, ids, kept_scores)


def perturbed(probs: Tensor, seed: int, position: int) -> Tensor:
    """`probs / e` for one row [vocab], float32: its order is that of `log p + g`."""
    support = probs.nonzero().squeeze(-1)
    if support.numel() * 4 > probs.numel():
        return probs / exponential(seed, position, torch.arange(probs.shape[-1], device=probs.device))
    scores = torch.zeros_like(probs)
    scores[support] = probs[support] / exponential(seed, position, support)
    return scores


def draw(
    logits: Tensor, params: SamplingParams, positions: Sequence[int], stop: StopConditions | None = None
) -> list[int]:
    """The token at each of `positions` (absolute: the index it will have in the log).

    logits: [len(positions), vocab]. Stop tokens are masked while the log would still be at most `stop.min_length` long.
    Raises DegenerateLogits.
    """
    if stop is not None:
        logits = mask_early_stops(logits, positions, stop)
    if params.temperature == 0.0:
        logits = logits.float()
        token_ids = logits.argmax(dim=-1)
        if not torch.isfinite(logits.gather(-1, token_ids.unsqueeze(-1))).all():
            raise DegenerateLogits("logits hold NaN or no finite value")
        return [int(token_id) for token_id in token_ids]
    probs = process_logits(logits, params)
    return [int(perturbed(row, params.seed, position).argmax()) for row, position in zip(probs, positions, strict=True)]


def mask_early_stops(logits: Tensor, positions: Sequence[int], stop: StopConditions) -> Tensor:
    """`logits` [rows, vocab] with -inf at the stop tokens in rows where the log is shorter than `stop.min_length`."""
    early = [row for row, position in enumerate(positions) if position < stop.min_length]
    banned = [token_id for token_id in stop.stop_token_ids if token_id < logits.shape[-1]]
    if not early or not banned:
        return logits
    masked = logits.clone()
    masked[torch.tensor(early).unsqueeze(-1), torch.tensor(banned)] = -torch.inf
    return masked
