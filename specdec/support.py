"""Which tokens of one row may be drawn, and which of them is: the law of a row on a CPU.

Filters leave few of 150,000 tokens, and noise lets few of those win; only these are looked at closely. A device has the
same law in `specdec.sampling` over the whole vocabulary, since there every look is a wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.noise import exponential_of, random_words
from specdec.params import SamplingParams

_LEAST_PROBS = (2**-13, 2**-24, 0.0)
"""A nucleus is looked for among the tokens above the first, then the second, then all."""
_LEAST_SCORES = (-8.0, -16.0, -24.0, -math.inf)
"""So are the `top_k` highest; the highest score is 0."""
_ROUNDING = 1e-5
"""More than float32 loses in a score, or in the mass of a vocabulary."""


@dataclass(frozen=True, slots=True)
class Support:
    """token_ids: int32 [tokens], ascending. probs: float32 [tokens], summing to 1."""

    token_ids: NDArray[np.int32]
    probs: NDArray[np.float32]

    @classmethod
    def of(cls, scores: NDArray[np.float32], params: SamplingParams) -> Support:
        """scores: tempered logits of one row [vocab], the highest of them 0."""
        if 0 < params.top_k < len(scores):
            places = _top_k(scores, params.top_k)
            kept = np.full_like(scores, -np.inf)
            kept[places] = scores[places]
            support = cls(places.astype(np.int32), _softmax(kept)[places])
        else:
            support = cls(np.arange(len(scores), dtype=np.int32), _softmax(scores))
        if params.top_p < 1.0:
            support = support._only(_nucleus(support.probs, params.top_p))
        if params.min_p > 0.0:
            support = support._only(np.flatnonzero(support.probs >= params.min_p * support.probs.max()))
        if params.typical_p < 1.0:
            probs = keep_typical(torch.from_numpy(support.probs), params.typical_p).numpy()
            support = support._only(np.flatnonzero(probs))
        return support

    def likeliest(self, seed: int, position: int, count: int) -> list[tuple[int, float]]:
        """The tokens of the `count` highest `probs / e`, highest first and the lowest id of equals, each with its
        `log p + g`; fewer where fewer may be drawn.

        `e = -log(1 - u)` lies between `u` and `u / (1 - u)`. So every score has bounds without a logarithm, and exact
        ones are made only of those that may be among the highest.
        """
        words = random_words(seed, position, self.token_ids)
        at_most = self.probs / ((words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32))
        leaders = [place for place, bound in highest_of(at_most, min(count, len(at_most))) if bound > 0.0]
        uniforms = (words[leaders] + 0.5) * 2**-32
        at_least = (self.probs[leaders] * (1 - uniforms) / uniforms).min()
        contenders = np.flatnonzero(at_most >= at_least * (1 - _ROUNDING))
        scores = self.probs[contenders] / exponential_of(words[contenders])
        order = np.argsort(-scores, kind="stable")[:count]
        return [(int(self.token_ids[contenders[i]]), math.log(scores[i])) for i in order if scores[i] > 0.0]

    def dense(self, vocabulary_size: int) -> Tensor:
        """Probabilities of all tokens, float32 [vocab]."""
        probs = torch.zeros(vocabulary_size)
        probs[torch.from_numpy(self.token_ids)] = torch.from_numpy(self.probs)
        return probs

    def _only(self, places: NDArray[np.intp]) -> Support:
        probs = self.probs[places]
        return Support(self.token_ids[places], probs / probs.sum())


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over a whole row, so that sums round as they do in the dense law."""
    probs: NDArray[np.float32] = torch.softmax(torch.from_numpy(scores), dim=-1).numpy()
    return probs


def _top_k(scores: NDArray[np.float32], top_k: int) -> NDArray[np.intp]:
    """Places of the `top_k` highest; equals of the last stay."""
    for least in _LEAST_SCORES:
        places = np.flatnonzero(scores >= least)
        if len(places) >= top_k:
            break
    threshold = np.partition(scores[places], -top_k)[-top_k]
    kept: NDArray[np.intp] = places[scores[places] >= threshold]
    return kept


def _nucleus(probs: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """Places of the smallest set of highest probabilities whose mass reaches `top_p`, the lowest of equals first; the
    highest always stays."""
    for least in _LEAST_PROBS:
        places = np.flatnonzero(probs > least)
        ordered, order = torch.sort(torch.from_numpy(probs[places]), descending=True, stable=True)
        mass = ordered.cumsum(dim=-1)
        if len(mass) and mass[-1] >= top_p + _ROUNDING:
            break
    kept: NDArray[np.intp] = places[order[mass - ordered < top_p].numpy()]
    kept.sort()
    return kept


def keep_typical(probs: Tensor, typical_p: float) -> Tensor:
    """Locally typical sampling (Meister et al., arXiv 2202.00666): the tokens whose surprise is nearest to the entropy,
    until their mass reaches `typical_p`."""
    surprise = -torch.log(probs)
    entropy = torch.where(probs > 0, probs * surprise, 0.0).sum(dim=-1, keepdim=True)
    distance = torch.where(probs > 0, (surprise - entropy).abs(), torch.inf)
    order = torch.sort(distance, dim=-1, stable=True).indices
    ordered = probs.gather(-1, order)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(mass_before >= typical_p, 0.0)
    probs = torch.zeros_like(probs).scatter_(-1, order, kept)
    return probs / probs.sum(dim=-1, keepdim=True)


def highest_of(values: NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """Places and values of the `count` highest, the first of equals first and NaN before all. `values` are changed
    meanwhile: a copy would take longer than the search."""
    found: list[tuple[int, float]] = []
    for _ in range(count):
        place = int(values.argmax())
        found.append((place, float(values[place])))
        values[place] = -np.inf
    for place, value in reversed(found):
        values[place] = value
    return found
