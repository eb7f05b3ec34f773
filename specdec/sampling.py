"""From logits to the next token: the processed law, and the draw with shared noise.

Target and drafter use the same functions with the same parameters; only then do they agree as often as their laws do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.noise import exponential, exponential_rows
from specdec.params import SamplingParams, StopConditions
from specdec.support import Support, keep_typical

NOTHING = -1
"""Stands for the token of a row that leaves nothing to draw; no candidate equals it."""


class DegenerateLogits(ValueError):
    """A row of logits holds NaN, or nothing above -inf: there is no law to draw from."""


def process_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law of the next token, float32 [rows, vocab], each row summing to 1.

    logits: float [rows, vocab]. Order as in transformers: temperature, top-k, top-p, min-p, typical-p. At temperature 0
    all mass is on the highest logit (lowest id of equals). Raises DegenerateLogits.
    """
    if params.temperature > 0.0 and not logits.is_cuda:
        return torch.stack([support.dense(logits.shape[-1]) for support in supports(logits, params)])
    logits = logits.float()
    highest = logits.max(dim=-1, keepdim=True).values
    if not torch.isfinite(highest).all():
        raise DegenerateLogits("logits hold NaN or no finite value")
    if params.temperature == 0.0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return dense_law((logits - highest) / params.temperature, params)


def supports(logits: Tensor, params: SamplingParams) -> list[Support]:
    """The law of each row of `logits`, float [rows, vocab] on a CPU, at a temperature above 0. Raises
    DegenerateLogits."""
    return [_support(row, params) for row in logits.float().numpy()]


def _support(row: NDArray[np.float32], params: SamplingParams) -> Support:
    highest = row[row.argmax()]
    if not np.isfinite(highest):
        raise DegenerateLogits("logits hold NaN or no finite value")
    scores = row - highest
    with np.errstate(over="ignore"):
        scores /= np.float32(params.temperature)
    return Support.of(scores, params)


def draw_rows(logits: Tensor, params: SamplingParams, places: Sequence[tuple[int, int]]) -> Tensor:
    """The token of each row under the shared noise of its (seed, position): int64 [rows], on the device of `logits`
    [rows, vocab], which nothing here waits for. NOTHING where a row leaves nothing to draw. The seed of `params` is not
    looked at."""
    logits = logits.float()
    highest = logits.max(dim=-1, keepdim=True).values
    if params.temperature == 0.0:
        token_ids = logits.argmax(dim=-1)
    else:
        probs = dense_law((logits - highest) / params.temperature, params)
        token_ids = (probs / exponential_rows(places, probs.shape[-1], probs.device)).argmax(dim=-1)
    return torch.where(torch.isfinite(highest.squeeze(-1)), token_ids, NOTHING)


def dense_law(scores: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities of tempered scores, both [rows, vocab], the highest of a row 0. It waits for no device and looks at
    the whole vocabulary; on a CPU `Support` is the same law."""
    if 0 < params.top_k < scores.shape[-1]:
        scores = _keep_top_k(scores, params.top_k)
    if params.top_p < 1.0:
        scores = _keep_top_p(scores, params.top_p)
    probs = torch.softmax(scores, dim=-1)
    if params.min_p > 0.0:
        probs = torch.where(probs < params.min_p * probs.max(dim=-1, keepdim=True).values, 0.0, probs)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    if params.typical_p < 1.0:
        probs = keep_typical(probs, params.typical_p)
    return probs


def _keep_top_k(scores: Tensor, top_k: int) -> Tensor:
    """-inf below the k-th highest score; equals of it stay."""
    threshold = torch.topk(scores, top_k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < threshold, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """-inf outside the smallest set of highest scores whose mass reaches `top_p`, the lowest of equals first; the
    highest always stays."""
    ordered, ids = torch.sort(torch.softmax(scores, dim=-1), dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.full_like(scores, -torch.inf)
    kept_scores = scores.gather(-1, ids).masked_fill(mass_before >= top_p, -torch.inf)
    return kept.scatter_(-1, ids, kept_scores)


def penalise(row: Tensor, history: Sequence[int], prompt_length: int, params: SamplingParams) -> Tensor:
    """A copy of one row of logits [vocab] with the penalties for the tokens before it.

    The repetition penalty (Keskar et al., arXiv 1909.05858) divides positive and multiplies negative logits of every
    token in `history`; presence and frequency penalties are subtracted for tokens behind `prompt_length`.
    """
    row = row.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(history)), device=row.device)
        before = row[seen]
        row[seen] = torch.where(before < 0, before * params.repetition_penalty, before / params.repetition_penalty)
    answer = history[prompt_length:]
    if answer and (params.presence_penalty or params.frequency_penalty):
        seen, counts = torch.unique(torch.tensor(answer), return_counts=True)
        row[seen.to(row.device)] -= (params.presence_penalty + params.frequency_penalty * counts).to(row.device)
    return row


def completed_bad_words(history: Sequence[int], bad_words: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that would complete one of the bad words of more than one token."""
    longer = [word for word in bad_words if len(word) > 1]
    return [word[-1] for word in longer if tuple(history[1 - len(word) :]) == tuple(word[:-1])]


def apply_fixed_edits(logits: Tensor, params: SamplingParams) -> Tensor:
    """`logits` [rows, vocab] with the bias added, and -inf for bad words of one token and for what is not allowed."""
    banned = [word[0] for word in params.bad_words if len(word) == 1]
    if not (params.logit_bias or banned or params.allowed_token_ids):
        return logits
    logits = logits.float().clone()
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits[:, list(token_ids)] += torch.tensor(biases, device=logits.device)
    if banned:
        logits[:, banned] = -torch.inf
    if params.allowed_token_ids:
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        allowed[list(params.allowed_token_ids)] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits


def perturbed(probs: Tensor, seed: int, position: int) -> Tensor:
    """`probs / e` for one row [vocab], float32: its order is that of `log p + g`."""
    return probs / exponential(seed, position, torch.arange(probs.shape[-1], device=probs.device))


def greedy(logits: Tensor) -> list[int]:
    """The highest logit of each row, the lowest id of equals. Raises DegenerateLogits."""
    logits = logits.float()
    if logits.is_cuda:
        best = logits.argmax(dim=-1)
        token_ids, sound = best.tolist(), bool(torch.isfinite(logits.gather(-1, best.unsqueeze(-1))).all())
    else:  # numpy takes a tenth of torch's time for it, and finds NaN first too
        values = logits.numpy()
        token_ids = values.argmax(axis=-1).tolist()
        sound = all(math.isfinite(row[token_id]) for row, token_id in zip(values, token_ids, strict=True))
    if not sound:
        raise DegenerateLogits("logits hold NaN or no finite value")
    return token_ids


@contextmanager
def early_stops_masked(logits: Tensor, positions: Sequence[int], stop: StopConditions) -> Iterator[Tensor]:
    """`logits` [rows, vocab] with -inf at the stop tokens in rows where the log is shorter than `stop.min_length`. On a
    CPU, float32, they are changed while this lasts: a copy would take longer than to draw from it."""
    early = [row for row, position in enumerate(positions) if position < stop.min_length]
    banned = [token_id for token_id in stop.stop_token_ids if token_id < logits.shape[-1]]
    if not early or not banned:
        yield logits
    elif logits.is_cuda:
        masked = logits.clone()
        masked[torch.tensor(early).unsqueeze(-1), torch.tensor(banned)] = -torch.inf
        yield masked
    else:
        values, places = logits.numpy(), np.ix_(early, banned)
        own = values[places]
        values[places] = -np.inf
        try:
            yield logits
        finally:
            values[places] = own
