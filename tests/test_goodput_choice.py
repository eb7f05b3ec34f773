"""`choose` finds the goodput that trying everything finds, for the reasons that the design names."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.decision import OFF, Decision
from specdec.estimates import Knots
from specdec.goodput import Inputs, Overheads, choose, goodput
from specdec.sharing import Member, share

FREE = (0.0, 0.0)


def _flat(seconds: float) -> Knots:
    return Knots(((1.0, seconds), (64.0, seconds)))


def _line(base: float, slope: float) -> Knots:
    return Knots(((1.0, base + slope), (101.0, base + 101 * slope)))


def _inputs(acceptance: float, **others: object) -> Inputs:
    values = {"verify": _flat(0.010), "draft": _line(0.0, 0.001), "max_draft_length": 12, **others}
    return Inputs((acceptance,) * 12, **values)  # type: ignore[arg-type]


def _random_inputs(rng: random.Random) -> Inputs:
    return Inputs(
        tuple(rng.uniform(0.0, 0.99) for _ in range(6)),
        verify=_line(rng.uniform(0.001, 0.02), rng.choice([0.0, 0.0005, 0.003])),
        draft=_line(rng.uniform(0, 0.01), rng.uniform(0.0, 0.005)),
        link=rng.choice([0.0, 0.005, 0.05]),
        rescue=rng.random() / 2,
        ahead=rng.random(),
        ahead_extra=rng.choice([0.0, 0.02]),
        overheads=Overheads(*(rng.uniform(-0.001, 0.003) for _ in range(4))),
        other_rows=rng.choice([0.0, 30.0]),
        other_tokens=rng.choice([0.0, 20.0]),
        max_draft_length=rng.randint(1, 6),
        max_width=rng.randint(1, 3),
        max_window=rng.randint(1, 8),
    )


@pytest.mark.parametrize("seed", range(200))
def test_choice_equals_trying_everything(seed: int) -> None:
    inputs = _random_inputs(random.Random(seed))
    everything = [
        Decision(*each)
        for each in itertools.product(
            range(1, inputs.max_draft_length + 1), range(1, inputs.max_width + 1), range(1, inputs.max_window + 1)
        )
    ]
    best = max(goodput(inputs, decision) for decision in [OFF, *everything])
    explained = choose(inputs, OFF, FREE)
    assert explained.goodput == pytest.approx(best)
    assert goodput(inputs, explained.decision) == explained.goodput


def test_stop_and_wait_is_expected_tokens_by_the_sum_of_times() -> None:
    inputs = _inputs(0.5, link=0.002)
    assert goodput(inputs, Decision(2)) == pytest.approx((1 + 0.5 + 0.25) / (0.010 + 0.002 + 0.002))
    assert goodput(inputs, OFF) == pytest.approx(100.0)


def test_a_hit_takes_the_longer_of_verify_and_draft() -> None:
    """Stop-and-wait blocks of 4, ahead blocks of 5 of which the first guesses the bonus, 10 ms each, no link: the gain
    over stop-and-wait that these hit rates allow."""
    for acceptance, gain in ((0.95, 1.63), (0.9, 1.42)):
        inputs = _inputs(acceptance, draft=_flat(0.010), max_window=4)
        once = sum(acceptance**n for n in range(5))
        hit_share = acceptance**5
        by_hand = once / (0.020 * (1 - hit_share) + 0.010 * hit_share)
        ahead = goodput(_inputs(acceptance, draft=_flat(0.010), max_window=4), Decision(5, window=4))
        assert ahead == pytest.approx(by_hand, rel=0.12)
        assert ahead / goodput(inputs, Decision(4)) == pytest.approx(gain, rel=0.12)


def test_drafting_ahead_is_a_block_and_hits_as_long_as_all_is_right() -> None:
    """By hand: two candidates, the bonus is guessed at the rate of the third depth, half of the blocks are there."""
    inputs = Inputs((0.9, 0.8, 0.7, 0.6), _flat(0.010), _flat(0.004), ahead=0.5, max_draft_length=4, max_window=4)
    hits = 0.72 * 0.35 / (1 - 0.9 * 0.35)
    by_hand = (2.62 + hits * 1.9) / (0.014 + hits * 0.010)
    assert goodput(inputs, Decision(2, window=4)) == pytest.approx(by_hand)


def test_what_others_commit_meanwhile_counts() -> None:
    inputs = _inputs(0.5, link=0.002, other_rows=4.0, other_tokens=3.0)
    assert goodput(inputs, Decision(1)) == pytest.approx(1.5 / 0.013 + 300.0)


def test_no_acceptance_or_a_slow_drafter_is_off() -> None:
    assert choose(_inputs(0.02)).decision == OFF
    assert choose(_inputs(0.5, draft=_line(0.0, 0.012))).decision == OFF
    assert not choose(_inputs(0.8)).decision.off


def test_a_long_link_favours_long_blocks_and_windows() -> None:
    near, far = choose(_inputs(0.9)).decision, choose(_inputs(0.9, link=0.050)).decision
    assert far.draft_length > near.draft_length
    assert choose(_inputs(0.9, link=0.050, max_window=8)).decision.window > 1


def test_shared_hardware_waits_and_own_hardware_drafts_ahead() -> None:
    assert choose(_inputs(0.9, max_window=8)).decision.window > 1
    assert choose(_inputs(0.9, max_window=8, ahead_extra=0.030)).decision.window == 1


def test_rows_that_cost_in_a_large_batch_switch_it_off() -> None:
    """Acceptance does not change; what is right does."""
    roofline = Knots(((1.0, 0.010), (64.0, 0.010), (512.0, 0.080)))
    cheap_drafts = _flat(0.001)

    def at(batch: int) -> Decision:
        inputs = _inputs(0.6, verify=roofline, draft=cheap_drafts, other_rows=batch - 1.0, other_tokens=batch - 1.0)
        return choose(inputs).decision

    assert at(1).draft_length >= 4
    assert at(128) == OFF
    lengths = [at(batch).draft_length for batch in (1, 16, 32, 64, 128)]
    assert lengths == sorted(lengths, reverse=True)


def test_width_pays_where_siblings_rescue() -> None:
    assert choose(_inputs(0.5, rescue=0.6, max_width=3)).decision.width > 1
    costly = _line(0.0, 0.004)
    assert choose(_inputs(0.5, rescue=0.05, max_width=3, verify=costly)).decision.width == 1


def test_small_gains_change_nothing() -> None:
    inputs = _inputs(0.8)
    best = choose(inputs, OFF, FREE).decision
    near = Decision(best.draft_length - 1)
    assert choose(inputs, near, FREE).decision == best
    assert choose(inputs, near, (0.5, 0.5)).decision == near
    assert choose(inputs, Decision(1)).decision == best


@pytest.mark.parametrize("seed", range(40))
def test_shared_budget_goes_where_it_gains_most(seed: int) -> None:
    rng = random.Random(seed)
    acceptances = [[rng.uniform(0.1, 0.95) for _ in range(3)] for _ in range(3)]
    verify = _line(rng.uniform(0.0, 0.02), rng.uniform(0.0005, 0.004))
    budget = rng.randint(3, 12)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = 0.0
        for rates, length in zip(acceptances, lengths, strict=True):
            reach = list(itertools.accumulate(rates[:length], lambda a, b: a * b))
            tokens += 1 + sum(reach)
        return tokens / verify(3 + sum(lengths))

    possible = [c for c in itertools.product(range(4), repeat=3) if 3 + sum(c) <= budget]
    shares = share([Member(tuple(rates)) for rates in acceptances], verify, budget)
    best = max(rate(c) for c in possible)
    found = rate(shares.lengths)
    assert found >= 0.995 * best
    assert shares.gain == pytest.approx(found / rate((0, 0, 0)) - 1)


def test_a_sequence_that_drafts_badly_gets_no_rows() -> None:
    good, bad = (0.9,) * 8, (0.05,) * 8
    lengths = share([Member(rates) for rates in (good, bad, good)], _line(0.005, 0.0005), 512).lengths
    assert lengths[1] == 0
    assert lengths[0] == lengths[2] > 2
