"""When the first token comes, in virtual time: speculation must not make anybody wait for it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from scheduler.config import Policy
from scheduler.request import GenerationRequest, Speculation, Tokens
from specdec.params import SamplingParams
from tools.virtual_system import GOODPUT, virtual_system
from tools.virtual_text import steady
from tools.virtual_time import run_virtually
from tools.virtual_workers import Costs

PROMPT = tuple(i % 60 for i in range(200))
SHARED = Costs(verify=lambda rows: 0.1 + 0.005 * rows, draft=lambda batch: 0.025, catch_up=0.002, shared=True)
"""One machine that target and drafter take turns for: a prefill of the prompt takes 1.1 s, the drafter's 0.4 s."""
OWN = Costs(verify=lambda rows: 0.1 + 0.005 * rows, draft=lambda batch: 0.005, catch_up=0.002)


def first(costs: Costs, speculation: Speculation, policy: Policy = Policy.FIXED) -> tuple[float, int]:
    """Seconds to the first event with tokens, and how many it has."""

    async def wait() -> tuple[float, int]:
        async with virtual_system(costs, steady(1.0), replace(GOODPUT, policy=policy)) as system:
            request = GenerationRequest(PROMPT, SamplingParams(temperature=0.0), max_tokens=40, speculation=speculation)
            began, found = time.monotonic(), (0.0, 0)
            async for event in system.scheduler.generate(request):
                if isinstance(event, Tokens) and not found[1]:
                    found = time.monotonic() - began, len(event.token_ids)
            return found

    return run_virtually(wait())


@pytest.mark.parametrize("policy", [Policy.FIXED, Policy.GOODPUT])
def test_who_shares_a_machine_with_a_drafter_waits_for_the_prefill_alone(policy: Policy) -> None:
    plain, _ = first(SHARED, Speculation.OFF)
    assert plain > 1.1
    seconds, count = first(SHARED, Speculation.ON, policy)
    assert count == 1
    assert seconds == pytest.approx(plain, abs=0.005)


def test_a_drafter_with_a_machine_of_its_own_has_a_block_ready_for_the_end_of_the_prefill() -> None:
    plain, _ = first(OWN, Speculation.OFF)
    seconds, count = first(OWN, Speculation.ON)
    assert count == 6
    assert seconds == pytest.approx(plain, rel=0.15)
