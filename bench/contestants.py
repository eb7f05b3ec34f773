"""Who answers a question, and how an answer is written down. Ours over gRPC; transformers in `bench.stock`, others in
`bench.peers`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider import AsyncClient, Finished, Tokens
from outrider.request import GenerateOptions, SpeculationMode


@dataclass(frozen=True, slots=True)
class Question:
    """One user message, answered with exactly `tokens` tokens. temperature 0: greedy."""

    prompt: str
    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """seconds: of the whole answer; first_seconds: until its first token, 0 if that is not told."""

    token_ids: Sequence[int]
    seconds: float
    first_seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """For the raw results; ids: a digest of the token ids, equal for equal answers."""
        ids = hashlib.blake2b(repr(list(self.token_ids)).encode(), digest_size=6).hexdigest()
        return {
            "tokens": len(self.token_ids),
            "seconds": round(self.seconds, 4),
            "first_seconds": round(self.first_seconds, 4),
            "ids": ids,
            **self.figures,
        }


class ContestantFailed(RuntimeError):
    """One did not start, ended, or answered something else than it was asked for. Says which, and its own words."""


class Contestant(Protocol):
    """Answers one question at a time. What it needs is loaded before the first one. Raises ContestantFailed."""

    name: str

    async def answer(self, question: Question) -> Answer: ...


class Batching(Protocol):
    """Answers several questions at once. Raises ContestantFailed."""

    name: str

    async def batch(self, questions: Sequence[Question]) -> tuple[list[list[int]], float]:
        """Token ids of each, and seconds for all. The first question says how all are answered."""
        ...


async def at_once(
    answer: Callable[[Question], Awaitable[Answer]], questions: Sequence[Question]
) -> tuple[list[list[int]], float]:
    """`batch` of one that answers any number of requests beside each other."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(answer(question) for question in questions))
    return [list(answer.token_ids) for answer in answers], time.perf_counter() - started


class Ours:
    """A deployment of ours, one way of speculating. draft_length: with `on`, exactly so many candidates."""

    def __init__(
        self, name: str, client: AsyncClient, speculation: SpeculationMode, draft_length: int | None = None
    ) -> None:
        self.name = name
        self._client = client
        self._speculation: SpeculationMode = speculation
        self._draft_length = draft_length

    async def answer(self, question: Question) -> Answer:
        options = GenerateOptions(
            messages=[{"role": "user", "content": question.prompt}],
            max_tokens=question.tokens,
            min_tokens=question.tokens,
            temperature=question.temperature,
            top_p=question.top_p,
            seed=question.seed,
            speculation=self._speculation,
            draft_length=self._draft_length,
        )
        return await streamed(self._client, options)

    async def batch(self, questions: Sequence[Question]) -> tuple[list[list[int]], float]:
        return await at_once(self.answer, questions)


async def streamed(client: AsyncClient, options: GenerateOptions) -> Answer:
    """Answers through the public stream, and notes when the tokens came."""
    started = time.perf_counter()
    token_ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    finished: Finished | None = None
    async for event in client.generate(**options):
        if isinstance(event, Tokens) and event.token_ids:
            token_ids += event.token_ids
            arrivals.append((time.perf_counter() - started, len(event.token_ids)))
        elif isinstance(event, Finished):
            finished = event
    seconds = time.perf_counter() - started
    if finished is None or not arrivals:
        raise ContestantFailed("an answer of ours ended without any token")
    return Answer(token_ids, seconds, arrivals[0][0], _figures(finished, arrivals))


def _figures(finished: Finished, arrivals: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """What speculation did. decode_rate: tokens per second behind the first event. round_seconds: from one event to the
    next, on average behind the second: until then the drafter reads the prompt too."""
    speculation = finished.speculation
    rounds = len(arrivals) - 2
    decoding = arrivals[-1][0] - arrivals[0][0]
    behind = sum(count for _, count in arrivals[1:])
    return {
        "decode_rate": round(behind / decoding, 3) if decoding > 0 else 0.0,
        "round_seconds": round((arrivals[-1][0] - arrivals[1][0]) / rounds, 5) if rounds > 0 else 0.0,
        "prompt_tokens": finished.prompt_tokens,
        "mode": speculation.mode,
        "drafts": speculation.num_drafts,
        "drafted": speculation.num_draft_tokens,
        "accepted": speculation.num_accepted_tokens,
        "plain_steps": speculation.num_plain_steps,
        "mean_acceptance_length": round(speculation.mean_acceptance_length, 4),
    }


async def ask_all(contestants: Iterable[Contestant], question: Question, first: int = 0) -> dict[str, dict[str, Any]]:
    """Rows by contestant. first: whose turn it is to begin, so that no one always follows the same other."""
    order = list(contestants)
    order = order[first % len(order) :] + order[: first % len(order)]
    return {contestant.name: (await contestant.answer(question)).row() for contestant in order}


def speedups(rows: Sequence[Mapping[str, Any]], ours: str, other: str) -> list[float]:
    """How many times as fast `ours` answered as `other`, prompt by prompt; empty if one of them took no part."""
    return [
        row["answers"][other]["seconds"] / row["answers"][ours]["seconds"]
        for row in rows
        if ours in row["answers"] and other in row["answers"]
    ]


def rates(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Tokens per second of each answer."""
    found = [row["answers"][name] for row in rows if name in row["answers"]]
    return [answer["tokens"] / answer["seconds"] for answer in found]
