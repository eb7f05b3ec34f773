"""What plain decoding must say, by transformers' own logits processors over a table law: no code of ours but the noise.

transformers has no presence and frequency penalty; theirs are written out here as OpenAI documents them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from services.generation import TokenPrompt, UserRequest
from specdec.noise import exponential
from specdec.params import LogprobsOf
from tools.table_law import Law


@dataclass(frozen=True, slots=True)
class Reference:
    """logprobs: of the law that the request asks for, one row [vocab] per token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Tensor, ...]


def reference(
    law: Law,
    request: UserRequest,
    count: int,
    stop_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> Reference:
    """`count` tokens, fewer if a stop token comes. The prompt must be token ids; bad_words: as the tokenizer has
    them."""
    assert isinstance(request.prompt, TokenPrompt)
    prompt = request.prompt.token_ids
    stops = [*stop_token_ids, *request.stop_token_ids]
    edits = _edits(request, len(prompt), stops, bad_words)
    warpers = _warpers(request)
    log = list(prompt)
    rows: list[Tensor] = []
    while len(log) < len(prompt) + count and not (len(log) > len(prompt) and log[-1] in stops):
        raw = torch.tensor(law.logits(log), dtype=torch.float32)[None]
        ids = torch.tensor([log])
        scores = edits(ids, raw.clone())  # type: ignore[arg-type]
        scores = _counted(scores, log[len(prompt) :], request)
        probs = _law(ids, scores, request, warpers)
        rows.append(_logprobs(raw, probs, request))
        log.append(_draw(probs, request, len(log)))
    return Reference(tuple(log[len(prompt) :]), tuple(rows))


def _edits(
    request: UserRequest, prompt_length: int, stops: Sequence[int], bad_words: Sequence[Sequence[int]]
) -> LogitsProcessorList:
    """In the order in which transformers' `generate` has them."""
    edits = LogitsProcessorList()
    if request.logit_bias:
        edits.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in request.logit_bias]))
    if request.repetition_penalty is not None:
        edits.append(RepetitionPenaltyLogitsProcessor(_float32(request.repetition_penalty)))
    if bad_words:
        edits.append(NoBadWordsLogitsProcessor([list(word) for word in bad_words]))
    if request.min_tokens and stops:
        edits.append(MinNewTokensLengthLogitsProcessor(prompt_length, request.min_tokens, list(stops)))
    if request.allowed_token_ids:
        allowed = list(request.allowed_token_ids)
        edits.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    return edits


def _warpers(request: UserRequest) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(_float32(request.temperature or 1.0))])
    if request.top_k:
        warpers.append(TopKLogitsWarper(request.top_k))
    if request.top_p is not None:
        warpers.append(TopPLogitsWarper(_float32(request.top_p)))
    if request.min_p is not None:
        warpers.append(MinPLogitsWarper(_float32(request.min_p)))
    if request.typical_p is not None:
        warpers.append(TypicalLogitsWarper(_float32(request.typical_p)))
    return warpers


def _counted(scores: Tensor, answer: Sequence[int], request: UserRequest) -> Tensor:
    presence, frequency = _float32(request.presence_penalty or 0.0), _float32(request.frequency_penalty or 0.0)
    for token_id, count in Counter(answer).items():
        scores[0, token_id] -= presence + frequency * count
    return scores


def _law(ids: Tensor, scores: Tensor, request: UserRequest, warpers: LogitsProcessorList) -> Tensor:
    """[vocab]"""
    if request.temperature == 0.0:
        return torch.nn.functional.one_hot(scores[0].argmax(), scores.shape[-1]).float()
    return torch.softmax(warpers(ids, scores), dim=-1)[0]  # type: ignore[arg-type]


def _draw(probs: Tensor, request: UserRequest, position: int) -> int:
    if request.temperature == 0.0:
        return int(probs.argmax())
    noise = exponential(request.seed or 0, position, torch.arange(len(probs)))
    return int((probs / noise).argmax())


def _logprobs(raw: Tensor, probs: Tensor, request: UserRequest) -> Tensor:
    if request.logprobs_of is LogprobsOf.PROCESSED:
        return torch.log(probs)
    return torch.log_softmax(raw[0], dim=-1)


def _float32(value: float) -> float:
    return float(np.float32(value))
