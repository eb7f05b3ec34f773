"""Drafting ahead over links with a delay, in virtual time: what the protocol itself leaves of what its hits allow.

Each host has its machine, and nothing but forwards and links takes time. A block is drafted in 10 ms and verified in
10 ms; stop-and-wait drafts 4 candidates, drafting ahead 5, of which the first guesses the bonus.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from scheduler.config import Policy
from scheduler.request import GenerationRequest
from specdec.params import SamplingParams
from tools.virtual_system import GOODPUT, virtual_system
from tools.virtual_text import steady
from tools.virtual_time import run_virtually
from tools.virtual_workers import Costs

BLOCK = 0.010
"""Seconds to draft a block, and to verify it."""
TOKENS, ANSWERS = 500, 4


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of one way of speculating. hits: verifies whose block lay ready."""

    seconds: float
    verifies: int
    hits: int

    def of_implied(self, delay: float, given_up: float = 0.0) -> float:
        """Share of what these hits allow, if a hit takes one forward, and a miss both and four hops, or the candidate
        that was in the making when it became known, where that takes longer."""
        misses = self.verifies - self.hits
        return (self.hits * BLOCK + misses * (2 * BLOCK + max(4 * delay, given_up))) / self.seconds


def run(acceptance: float, delay: float, draft_length: int, window: int) -> Run:
    costs = Costs(verify=lambda rows: BLOCK, draft=lambda batch: BLOCK / draft_length, link=delay)
    config = replace(GOODPUT, policy=Policy.FIXED, draft_length=draft_length, window=window)

    async def all_answers() -> Run:
        async with virtual_system(costs, steady(acceptance), config) as system:
            began, verifies, hits = time.monotonic(), 0, 0
            for number in range(ANSWERS):
                request = GenerationRequest((number, 1, 2), SamplingParams(temperature=0.0), max_tokens=TOKENS)
                answer = await system.generate(request)
                assert answer.finished is not None
                verifies += answer.finished.speculation.num_drafts
                hits += answer.finished.speculation.num_ahead_hits
            return Run(time.monotonic() - began, verifies, hits)

    return run_virtually(all_answers())


@pytest.mark.parametrize(
    ("acceptance", "delay", "times_as_fast"),
    [(0.95, 0.0, 1.5), (0.95, 0.005, 2.2), (0.9, 0.0, 1.3), (0.9, 0.005, 1.65)],
)
def test_nothing_is_lost_of_what_the_hits_allow(acceptance: float, delay: float, times_as_fast: float) -> None:
    waiting = run(acceptance, delay, draft_length=4, window=1)
    ahead = run(acceptance, delay, draft_length=5, window=4)
    assert waiting.hits == 0
    assert waiting.of_implied(delay) >= 0.95
    assert ahead.of_implied(delay, given_up=BLOCK / 5) >= 0.95
    assert waiting.seconds / ahead.seconds >= times_as_fast
