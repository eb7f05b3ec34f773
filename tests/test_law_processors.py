"""The law of every parameter is that of transformers' logits processors, row by row inside a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec.law import Law
from specdec.params import SamplingParams, StopConditions

VOCABULARY_SIZE = 40
PROMPT = (3, 5, 3, 11, 7)
ANSWER = (5, 20, 5)
PATHS = [(), (20,), (20, 3), (20, 3, 20), (9,), (9, 9)]
STOP = StopConditions(len(PROMPT), 200, min_length=len(PROMPT) + 5, stop_token_ids=frozenset({2, 20}))
NO_STOP = StopConditions(len(PROMPT), 200)

CASES = {
    "typical_p 0.3": SamplingParams(typical_p=0.3),
    "typical_p 0.9": SamplingParams(typical_p=0.9, temperature=0.7),
    "repetition_penalty": SamplingParams(repetition_penalty=1.7),
    "repetition_penalty below 1": SamplingParams(repetition_penalty=0.6),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=-1.2),
    "logit_bias": SamplingParams(logit_bias=((4, 3.0), (20, -5.5), (5, -100.0))),
    "bad words": SamplingParams(bad_words=((6,), (20, 3), (5, 20, 3), (9, 9, 1), (11, 7, 5, 20, 5, 9))),
    "allowed ids": SamplingParams(allowed_token_ids=(3, 4, 5, 6, 20)),
    "all": SamplingParams(
        temperature=0.8,
        top_p=0.97,
        typical_p=0.95,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.6,
        logit_bias=((4, 3.0), (20, 2.5), (3, -4.0)),
        bad_words=((6,), (20, 3), (9, 9, 1)),
        allowed_token_ids=tuple(range(30)),
    ),
}


def reference(row: Tensor, log: Sequence[int], params: SamplingParams, stop: StopConditions) -> Tensor:
    """[vocab]: processors in the order in which transformers' `generate` has them. It has no presence and frequency
    penalty: those are OpenAI's formula, over the answer."""
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in params.logit_bias]))
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if stop.stop_token_ids:
        least = stop.min_length - stop.prompt_length
        chain.append(MinNewTokensLengthLogitsProcessor(stop.prompt_length, least, sorted(stop.stop_token_ids)))
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        chain.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, num_beams=1))
    ids = torch.tensor([log])
    scores = chain(ids, row[None].clone())  # type: ignore[arg-type]
    for token_id, count in Counter(log[stop.prompt_length :]).items():
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * count
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    return torch.softmax(warpers(ids, scores)[0], dim=-1)  # type: ignore[arg-type]


def worst_difference(params: SamplingParams, stop: StopConditions) -> float:
    logits = torch.randn(len(PATHS), VOCABULARY_SIZE, generator=torch.Generator().manual_seed(7)) * 2.5
    log = [*PROMPT, *ANSWER]
    probs = Law(params, stop, log).probs(logits, PATHS)
    wanted = [reference(row, [*log, *path], params, stop) for row, path in zip(logits, PATHS, strict=True)]
    return float((probs - torch.stack(wanted)).abs().max())


@pytest.mark.parametrize("stop", [NO_STOP, STOP], ids=["", "min_tokens"])
@pytest.mark.parametrize("case", CASES)
def test_the_law_is_transformers_in_every_row(case: str, stop: StopConditions) -> None:
    assert worst_difference(CASES[case], stop) < 1e-5


def test_each_row_follows_its_own_path() -> None:
    """Equal logits in every row: what differs is what stands before it."""
    logits = torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(8)).repeat(len(PATHS), 1)
    log = [*PROMPT, *ANSWER]
    for case in ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad words"):
        law = Law(CASES[case], NO_STOP, log)
        for i, (row, path) in enumerate(zip(law.probs(logits, PATHS), PATHS, strict=True)):
            plain = Law(CASES[case], NO_STOP, [*log, *path]).probs(logits[:1], [()])[0]
            assert torch.equal(row, plain), f"{case}: row {i} is not the plain step behind its path"
    rows = Law(CASES["presence_penalty"], NO_STOP, log).probs(logits, PATHS)
    assert not torch.equal(rows[0], rows[4])


@pytest.mark.parametrize("case", CASES)
def test_a_log_that_grows_gives_the_same_law_as_a_path(case: str) -> None:
    """Committed or candidate, a token counts the same."""
    logits = torch.randn(1, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(9))
    log = [*PROMPT, *ANSWER]
    law = Law(CASES[case], STOP, log)
    before = law.probs(logits, [(9, 9)])
    log += (9, 9)
    assert torch.equal(law.probs(logits, [()]), before)


def test_greedy_takes_the_edited_logits() -> None:
    params = replace(CASES["all"], temperature=0.0, top_p=1.0, typical_p=1.0)
    logits = torch.randn(len(PATHS), VOCABULARY_SIZE, generator=torch.Generator().manual_seed(10))
    log = [*PROMPT, *ANSWER]
    wanted = [
        int(reference(row, [*log, *path], replace(params, temperature=1.0), STOP).argmax())
        for row, path in zip(logits, PATHS, strict=True)
    ]
    assert Law(params, STOP, log).draw(logits, PATHS) == wanted
