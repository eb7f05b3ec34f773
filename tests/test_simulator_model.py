"""The model of a fleet against what can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulator.costs import Costs, Curve
from bench.simulator.fleet import FleetConfig
from bench.simulator.sequence import SimSequence
from bench.simulator.simulation import Arrival, Outcome, arriving, poisson, read_trace, steady, together

NOTHING = Curve(((0.0, 0.0),))
COSTS = Costs(
    verify=Curve.line(0.020, 0.0002),
    draft=Curve.line(0.004, 0.0001),
    hop=0.0003,
    worker_item=0.0001,
    scheduler_message=0.0002,
    scheduler_item=0.0001,
    acceptance=(0.8,),
)
NETWORK = FleetConfig(delay=0.002)


def rate(config: FleetConfig, costs: Costs = COSTS, users: int = 1) -> float:
    return steady(config, costs, users, tokens=200, prompt=1, warm_up=5, seconds=40).goodput


def test_a_curve_goes_through_its_knots_and_on() -> None:
    curve = Curve(((1.0, 10.0), (2.0, 12.0), (4.0, 20.0)))

    assert [curve(x) for x in (0, 1, 1.5, 2, 3, 4, 6)] == [10, 10, 11, 12, 16, 20, 28]


def test_costs_survive_a_file() -> None:
    assert Costs.from_dict(json.loads(json.dumps(COSTS.as_dict()))) == COSTS


def test_one_round_takes_what_its_parts_take() -> None:
    outcome = together(NETWORK, COSTS, requests=1, tokens=400)

    draft, verify = 4 * 0.0041, 0.020 + 5 * 0.0002
    by_hand = draft + verify + 4 * (0.002 + 0.0003) + 2 * 0.0001 + 2 * (0.0002 + 0.0001)
    assert 1 / outcome.rounds_per_second == pytest.approx(by_hand, rel=0.02)


def test_tokens_of_a_round_follow_the_acceptance() -> None:
    outcome = together(NETWORK, COSTS, requests=16, tokens=2000)

    expected = 1 + sum(0.8**depth for depth in range(1, 5))
    assert outcome.goodput / outcome.rounds_per_second == pytest.approx(expected, rel=0.02)


def test_plain_decoding_waits_for_nothing_but_the_target() -> None:
    outcome = together(replace(NETWORK, draft_length=0, delay=0.050), COSTS, requests=4, tokens=400)

    assert outcome.rounds_per_second == pytest.approx(4 / (0.020 + 4 * 0.0002), rel=0.02)
    assert outcome.goodput == pytest.approx(outcome.rounds_per_second, rel=0.02)


def test_a_window_hides_the_network_if_all_is_accepted() -> None:
    sure = replace(COSTS, acceptance=(1.0,), draft=Curve.line(0.002, 0.0))
    far = replace(NETWORK, delay=0.010)

    assert rate(replace(far, window=4), sure) == pytest.approx(
        4 / (0.020 + 4 * 0.0002), rel=0.15
    )  # verifies end to end
    assert rate(far, sure) < 0.7 * rate(replace(far, window=4), sure)


def test_a_window_gains_nothing_if_nothing_is_accepted() -> None:
    wrong = replace(COSTS, acceptance=(0.0,))

    assert rate(replace(NETWORK, window=4), wrong) <= 1.05 * rate(NETWORK, wrong)


def test_a_drafter_that_many_share_is_what_limits() -> None:
    few, many = FleetConfig(8, 1), FleetConfig(8, 8)
    shared = steady(few, COSTS, 64, 200, 1, 2, 4)

    assert shared.drafter_busy > 0.95
    assert shared.goodput < 0.8 * steady(many, COSTS, 64, 200, 1, 2, 4).goodput


def test_a_scheduler_gives_no_more_than_its_thread_can() -> None:
    slow = replace(COSTS, scheduler_message=0.0, scheduler_item=0.002)
    outcome = steady(FleetConfig(16, 16), slow, 128, 200, 1, 2, 4)

    assert outcome.scheduler_busy > 0.97
    assert outcome.rounds_per_second == pytest.approx(1 / (2 * 0.002), rel=0.05)


def test_a_long_prompt_holds_the_first_token_up() -> None:
    def wait(prompt: int) -> float:
        return arriving(NETWORK, COSTS, [Arrival(0.0, prompt, 10)]).wait(0.5)

    assert wait(401) - wait(1) == pytest.approx(400 * 0.0002)


def test_every_token_is_told_once_whatever_the_window() -> None:
    arrivals = poisson(rate=4.0, seconds=10.0, prompt=20, tokens=50, seed=3)
    for window in (1, 2, 5):
        outcome = arriving(replace(NETWORK, window=window), COSTS, arrivals)
        assert round(outcome.goodput * outcome.seconds) == sum(arrival.tokens for arrival in arrivals)
        assert len(outcome.waits) == len(arrivals)


def test_a_seed_repeats_the_run() -> None:
    def run(seed: int) -> Outcome:
        return steady(FleetConfig(2, 1, window=2), COSTS, 8, 50, 10, 1, 2, seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 2.5, "prompt": 7, "tokens": 9}\n\n{"at": 0.5, "prompt": 1, "tokens": 2}\n')

    assert read_trace(path) == [Arrival(0.5, 1, 2), Arrival(2.5, 7, 9)]


def test_a_drafter_keeps_of_its_tail_what_is_right() -> None:
    sequence = SimSequence(100, 1, 0.0)
    first, ahead = sequence.drafted([True, True]), sequence.drafted([True, False])
    assert (ahead.base, ahead.end, ahead.right_until) == (2, 4, 3)

    sequence.offer(first)
    sequence.offer(ahead)
    assert sequence.held == [ahead]
    assert sequence.verify().length == 3  # two candidates and the bonus
    assert sequence.pending is ahead
    sequence.advance(3)
    assert (sequence.draft_log, sequence.in_flight) == (4, [4])  # the guess of the bonus was right
    verdict = sequence.verify()
    assert (verdict.length, verdict.accepted) == (4, 0)
    sequence.advance(4)
    assert (sequence.draft_log, sequence.wrong_at, sequence.in_flight) == (4, None, [])


def test_a_block_behind_a_wrong_one_is_stale() -> None:
    sequence = SimSequence(100, 1, 0.0)
    first, ahead = sequence.drafted([False, True]), sequence.drafted([True, True])
    sequence.offer(first)
    sequence.offer(ahead)

    assert sequence.verify().length == 1  # the correction
    assert sequence.held == [ahead]  # its base is beyond the log until then
    assert sequence.verify().length == 2  # plainly
    assert (sequence.held, sequence.pending) == ([], None)
