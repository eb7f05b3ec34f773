"""What the rule tests share: prompts, references from the law, and the check of many streams at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.request import Finished, GenerationRequest, SpeculationSummary
from specdec.commit import FinishReason
from specdec.params import SamplingParams, StopConditions
from tools.continuations import plain_output
from tools.deployment import Answer, SystemUnderTest
from tools.history import History, Terminal
from tools.table_law import TableLaw

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1234)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the target says to a request when it speaks alone, one token at a time."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def prompts(count: int, vocabulary_size: int = 64, seed: int = 0) -> list[tuple[int, ...]]:
    """Of 1 to 40 tokens; every third repeats itself, as texts do that drafters by lookup like."""
    rng = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for i in range(count):
        piece = [rng.randrange(vocabulary_size) for _ in range(rng.randint(1, 10))]
        made.append(tuple(piece * 4 if i % 3 == 0 else piece))
    return made


def expected(law: TableLaw, request: GenerationRequest, context_length: int = 512) -> Expected:
    """From the law alone: no worker, no scheduler, no commit function takes part."""
    length = len(request.token_ids)
    room = context_length - length
    budget = room if request.max_tokens is None else min(request.max_tokens, room)
    stop = StopConditions(length, length + budget, length + request.min_tokens, request.stop_token_ids)
    token_ids = plain_output(law, request.token_ids, request.sampling, budget, stop)
    for i, token_id in enumerate(token_ids):
        if token_id in request.stop_token_ids:
            return Expected(tuple(token_ids[: i + 1]), FinishReason.STOP)
    return Expected(tuple(token_ids), FinishReason.LENGTH)


async def check_all(
    system: SystemUnderTest, law: TableLaw, requests: Sequence[GenerationRequest], context_length: int = 512
) -> list[Answer]:
    """Runs all requests side by side and holds each against the law: ids, finish reason, usage, positions, one end."""
    history = History()
    right = [expected(law, request, context_length) for request in requests]
    for i, its in enumerate(right):
        history.expect(str(i), its.token_ids)
    answers = await asyncio.gather(
        *(system.generate(request, history.request(str(i))) for i, request in enumerate(requests))
    )
    assert history.violations() == []
    for its, answer in zip(right, answers, strict=True):
        assert answer.finish_reason is its.finish_reason
        assert len(answer.sources) == len(answer.token_ids)
        assert answer.finished is not None
        assert consistent(answer.finished)
    assert all(history.request(str(i)).ends[0].terminal is Terminal.FINISHED for i in range(len(requests)))
    return list(answers)


def consistent(finished: Finished) -> bool:
    """The figures of a summary agree with one another."""
    figures = finished.speculation
    rate = figures.acceptance_rate
    return (
        0 <= figures.num_accepted_tokens <= figures.num_draft_tokens
        and sum(figures.num_accepted_tokens_per_position) == figures.num_accepted_tokens
        and (rate is None or 0.0 <= rate <= 1.0)
        and figures.num_speculative_tokens + figures.num_plain_steps == finished.completion_tokens
    )


def total(answers: Sequence[Answer]) -> SpeculationSummary:
    """Sums of the figures of several requests."""
    summed = SpeculationSummary()
    for answer in answers:
        if answer.finished is None:
            continue
        figures = answer.finished.speculation
        summed.num_drafts += figures.num_drafts
        summed.num_draft_tokens += figures.num_draft_tokens
        summed.num_accepted_tokens += figures.num_accepted_tokens
        summed.num_plain_steps += figures.num_plain_steps
        summed.num_failovers += figures.num_failovers
        summed.num_stale_blocks += figures.num_stale_blocks
        for reason, count in figures.fallbacks.items():
            summed.fallbacks[reason] = summed.fallbacks.get(reason, 0) + count
    return summed
