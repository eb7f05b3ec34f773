"""10 000 tokens per accept rule through gRPC over real sockets: a scheduler, a target and a draft worker process.

The table law looks back one token, so the answers are Markov chains, and every token is a draw from the law behind the
one before it, whatever round it came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch

from scheduler.request import GenerationRequest, Speculation
from specdec.commit import TokenSource
from specdec.law import Law
from specdec.params import AcceptRule, SamplingParams, StopConditions
from tools.cases import total
from tools.deployment import Answer, quick_config
from tools.law_statistics import Fit, require
from tools.socket_deployment import SocketDeployment
from tools.table_law import TableLaw

SIZE, REQUESTS, TOKENS = 16, 100, 101
TABLE = TableLaw(SIZE, order=1, sharpness=3.0, salt="socket")
ARGUMENTS = f"--vocabulary-size {SIZE} --order 1 --sharpness 3.0 --salt socket"
SAMPLING = SamplingParams(temperature=0.9, top_k=12)
COMPARISONS = 2 * len(AcceptRule)


def laws() -> npt.NDArray[np.float64]:
    """[context token, token]"""
    logits = torch.stack([torch.tensor(TABLE.logits([token_id])) for token_id in range(SIZE)])
    probs = Law(SAMPLING, StopConditions(1, 500), [0]).probs(logits, [()] * SIZE).double()
    return (probs / probs.sum(dim=-1, keepdim=True)).numpy()


def request(rule: AcceptRule, number: int) -> GenerationRequest:
    sampling = SamplingParams(SAMPLING.temperature, SAMPLING.top_k, seed=number * 1_000_003 + 17, accept_rule=rule)
    return GenerationRequest((number % SIZE,), sampling, max_tokens=TOKENS, speculation=Speculation.ON)


def tokens_fit(answers: list[Answer]) -> Fit:
    """Of each token behind the one before, apart for those behind an accepted one and those behind another."""
    counts = np.zeros((2, SIZE, SIZE), dtype=np.int64)
    for answer in answers:
        pairs = zip(answer.token_ids, answer.token_ids[1:], answer.sources, strict=False)
        for before, token_id, source in pairs:
            counts[int(source is TokenSource.ACCEPTED), before, token_id] += 1
    return Fit.of_rows(counts.reshape(-1, SIZE), np.tile(laws(), (2, 1)))


def pairs_fit(answers: list[Answer]) -> Fit:
    """Of two tokens behind the one before."""
    law = laws()
    counts = np.zeros((SIZE, SIZE, SIZE), dtype=np.int64)
    for answer in answers:
        for i in range(0, len(answer.token_ids) - 2, 2):
            before, first, second = answer.token_ids[i : i + 3]
            counts[before, first, second] += 1
    pairs = law[:, :, None] * law[None]
    return Fit.of_rows(counts.reshape(SIZE, -1), pairs.reshape(SIZE, -1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[SocketDeployment]:
    """Three candidates in a row, of up to three siblings; `block` has chains only."""
    async with SocketDeployment(
        [f"table_target {ARGUMENTS}"], [f"table_draft {ARGUMENTS} --agreement 0.5"], quick_config(3, width=3)
    ) as system:
        yield system


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("rule", list(AcceptRule), ids=lambda rule: rule.value)
async def test_the_law_over_sockets(system: SocketDeployment, rule: AcceptRule) -> None:
    answers = await asyncio.gather(*(system.generate(request(rule, i)) for i in range(REQUESTS)))
    assert all(len(answer.token_ids) == TOKENS for answer in answers)
    figures = total(answers)
    assert figures.num_drafts > 1000
    assert 0.1 < figures.num_accepted_tokens / figures.num_draft_tokens < 0.9
    require("tokens", tokens_fit(answers), COMPARISONS)
    require("pairs", pairs_fit(answers), COMPARISONS)
