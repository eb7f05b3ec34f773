"""What the goodput policy reaches in the whole system, in virtual time, with costs like those of real machines.

Other lengths are judged in hindsight, on the same texts; the policy begins with workers that it knows nothing of.
"""

from __future__ import annotations

import statistics

import pytest

from scheduler.request import GenerationRequest, Started, Tokens
from specdec.decision import Decision
from specdec.estimates import Knots
from specdec.params import SamplingParams
from tools.virtual_system import PLAIN, seconds, virtual_system
from tools.virtual_text import Luck, begins_to_copy, by_phase, copying, mixed, repeating, steady
from tools.virtual_time import run_virtually
from tools.virtual_workers import Costs

SHARED = Costs(
    verify=lambda rows: 0.104 + 0.003 * max(rows - 4, 0),
    draft=lambda batch: 0.025 * (1 + 0.15 * (batch - 1)),
    catch_up=0.003,
    shared=True,
)
"""A model of 1.5B with a draft model of 0.5B that takes turns with it on two cores."""
SLOW = Costs(
    verify=lambda rows: 0.170 * (1 + 0.03 * (rows - 1)),
    draft=lambda batch: 0.025 * (1 + 0.15 * (batch - 1)),
    catch_up=0.003,
    shared=True,
)
"""The same on a slower target, of which every row costs."""
OWN = Costs(verify=lambda rows: 0.010 + 0.0003 * rows, draft=lambda batch: 0.001)
"""Hardware of its own for each."""
SMALL = Costs(verify=lambda rows: 0.012 + 0.0016 * max(rows - 4, 0), draft=lambda batch: 0.0003 + 0.00002 * batch)
"""A model of 135M with a drafter that looks text up, and takes no turns for that."""
ROWS = Knots(((1, 0.033), (4, 0.035), (8, 0.043), (16, 0.058), (32, 0.090), (48, 0.112), (64, 0.180), (128, 0.340)))
BATCHED = Costs(verify=lambda rows: ROWS(rows), draft=lambda batch: 0.0001 + 0.00007 * batch, link=0.0015)
"""SmolLM2 as it was measured with up to 64 sequences, and the same drafter."""
QUICK_ROWS = Knots(((1, 0.017), (4, 0.019), (8, 0.026), (16, 0.036), (32, 0.056), (64, 0.088), (128, 0.165)))
QUICK = Costs(verify=lambda rows: QUICK_ROWS(rows), draft=lambda batch: 0.0001 + 0.00007 * batch, link=0.0015)
"""The same with compiled layers: what a round takes besides its forward weighs twice as much."""
LENGTHS = (PLAIN, 1, 2, 3, 4, 6, 8)
COLD, TOKENS = 10, 64


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("costs", [SHARED, OWN], ids=["shared", "own"])
def test_a_drafter_that_is_always_wrong_costs_little_even_at_first(costs: Costs, batch: int) -> None:
    never = steady(0.0)
    plain = seconds(costs, never, batch, 1, 128, PLAIN)[0]
    found = seconds(costs, never, batch, 20, 128)
    assert plain / found[0] >= 0.90
    assert 20 * plain / sum(found) >= 0.97


def test_what_drafting_costs_is_learned_from_drafts_that_waited_for_nobody() -> None:
    """A probe waits for the target's forward, and its drafter reads first what it was not told before."""

    async def learned() -> float:
        async with virtual_system(SHARED, steady(0.0)) as system:
            await system.seconds(1, 0, 256)
            return system.last[0][-1].inputs.draft(1)

    assert run_virtually(learned()) == pytest.approx(SHARED.draft(1), rel=0.1)


async def _decisions(costs: Costs, luck: Luck, prompt: int, tokens: int) -> list[tuple[int, Decision]]:
    """After each commit: tokens so far, and what is decided."""
    seen: list[tuple[int, Decision]] = []
    async with virtual_system(costs, luck) as system:
        length, sequence_id = 0, ""
        request = GenerationRequest((prompt, 1, 2, 3), SamplingParams(temperature=0.0), max_tokens=tokens)
        async for event in system.scheduler.generate(request):
            if isinstance(event, Started):
                sequence_id = event.sequence_id
            elif isinstance(event, Tokens):
                length += len(event.token_ids)
                seen.append((length, system.scheduler.explained(sequence_id)[-1].decision))
    return seen


@pytest.mark.parametrize("bad_tokens", [200, 1500])
def test_it_is_off_soon_after_a_fall_and_back_soon_after_a_rise(bad_tokens: int) -> None:
    """Acceptance 0.9, 0.05, 0.9; however long it was bad."""
    falls, rises = 200, 200 + bad_tokens
    luck = by_phase(lambda position: 0.05 if falls <= position < rises else 0.9)
    until_off, until_back = [], []
    for prompt in range(3):
        seen = run_virtually(_decisions(OWN, luck, prompt, rises + 300))
        lengths = [(at, 0 if decision.probe else decision.draft_length) for at, decision in seen]
        former = statistics.median([length for at, length in lengths if at < falls][-30:])
        bad = [length for at, length in lengths if falls <= at < rises]
        good = [length for at, length in lengths if at >= rises]
        until_off.append(bad.index(0))
        until_back.append(next(i for i, length in enumerate(good) if length >= 0.8 * former))
        assert former >= 4
        assert statistics.median(good[-50:]) >= 0.8 * former
    assert max(until_off) <= 10
    assert max(until_back) <= 50


def _speed_over_plain(costs: Costs, luck: Luck, batch: int, requests: int) -> float:
    plain = sum(seconds(costs, luck, batch, requests, TOKENS, PLAIN))
    return plain / sum(seconds(costs, luck, batch, requests, TOKENS))


def _share_of_best(costs: Costs, luck: Luck, lengths: tuple[int, ...] = LENGTHS, requests: int = COLD) -> float:
    best = min(sum(seconds(costs, luck, 1, requests, TOKENS, length)) for length in lengths)
    return best / sum(seconds(costs, luck, 1, requests, TOKENS))


@pytest.mark.parametrize("acceptance", [0.6, 0.9])
def test_texts_of_every_kind_get_the_best_fixed_length_or_better(acceptance: float) -> None:
    """A drafter that knows how sure it is stops where it doubts, which no fixed length does."""
    assert _share_of_best(SHARED, mixed(acceptance), (PLAIN, 2, 3, 6)) >= 1.0


@pytest.mark.parametrize("found", [0.6, 0.9])
def test_a_drafter_that_often_has_nothing_to_propose_is_still_asked(found: float) -> None:
    assert _share_of_best(SMALL, copying(0.95, found), (PLAIN, 5, 8)) >= 0.97


@pytest.mark.parametrize("batch", [1, 4])
def test_a_drafter_that_has_never_anything_to_propose_is_soon_waited_for_no_more(batch: int) -> None:
    """What asking costs is known though nothing was ever drafted."""
    nothing = copying(0.9, 0.0)
    assert _speed_over_plain(QUICK, nothing, batch, 2) >= 0.97


def test_a_text_that_repeats_itself_in_even_steps_is_seen_to() -> None:
    """Three tokens in eight can be copied; probes in even steps would meet the other five for ever."""
    lines = repeating(8, 3)
    assert _speed_over_plain(QUICK, lines, 1, 8) >= 1.05


def test_a_small_batch_that_copies_gains_though_its_forwards_are_quick() -> None:
    """Waiting takes a third of a forward, and is still shorter than the forward that would be missed."""
    luck = copying(0.95, 1.0)
    assert _speed_over_plain(QUICK, luck, 4, 4) >= 1.5


def test_in_a_batch_a_drafter_that_is_seldom_of_use_costs_little() -> None:
    luck = copying(0.9, 0.3)
    assert _speed_over_plain(SMALL, luck, 16, 2) >= 0.97


@pytest.mark.parametrize("acceptance", [0.8, 0.9])
def test_a_batch_speculates_where_only_all_of_it_together_gain(acceptance: float) -> None:
    """One alone waits for the forward of the others."""
    luck = mixed(acceptance)
    assert _speed_over_plain(OWN, luck, 16, 3) >= 1.07


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_a_batch_that_begins_to_copy_in_the_midst_of_its_texts_is_not_slower_than_plain(batch: int) -> None:
    """First the drafter finds little, and that is wrong; then nearly everything."""
    luck = begins_to_copy(10, 20)
    assert _speed_over_plain(BATCHED, luck, batch, 3) >= 0.97


def test_a_batch_that_copies_gains_though_each_row_costs() -> None:
    """What its sequences gain goes if they miss the forwards of each other, or decide as if the others went on."""
    luck = copying(0.95, 1.0)
    assert _speed_over_plain(BATCHED, luck, 16, 8) >= 1.14


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("costs", [SHARED, SLOW], ids=["shared", "slow"])
def test_no_text_gets_less_than_the_best_fixed_length(costs: Costs, acceptance: float) -> None:
    assert _share_of_best(costs, mixed(acceptance)) >= 0.98
