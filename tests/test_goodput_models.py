"""Cost and acceptance models come near the truth under noise, follow changes, and one outlier does not move them."""

from __future__ import annotations

import random
import statistics

import pytest

from specdec.candidates import CandidateTree
from specdec.costs import DrafterModel, TargetModel, TargetStep
from specdec.estimates import Curve, RunningMean
from specdec.observations import BlockOutcome, Trial, outcome
from specdec.probing import FIRST, LATER, Probing, probe_length
from specdec.rates import Acceptance, DrafterAcceptance


def _noisy(rng: random.Random, seconds: float) -> float:
    """5 % of noise, and one time in thirty the machine looks away."""
    return seconds * rng.gauss(1, 0.05) * (20 if rng.random() < 1 / 30 else 1)


def _block(rng: random.Random, acceptance: float, length: int) -> BlockOutcome:
    trials: list[Trial] = []
    for _ in range(length):
        trials.append(Trial(0 if rng.random() < acceptance else None))
        if trials[-1].rank is None:
            return BlockOutcome(tuple(trials))
    return BlockOutcome(tuple(trials), full=True)


def test_verify_time_by_rows_and_context_is_learned_under_noise() -> None:
    rng = random.Random(1)
    model = TargetModel()

    def truth(rows: int, context: int) -> float:
        return 0.010 + 0.0004 * rows + 1e-6 * context

    for step in range(600):
        rows, context = rng.choice([1, 3, 6, 9, 17, 33]), step * 10
        model.observe(TargetStep(_noisy(rng, truth(rows, context)), rows, context))
    for rows in (1, 5, 12, 17, 33, 48):
        assert model.seconds(rows) == pytest.approx(truth(rows, 5990), rel=0.15)


def test_one_outlier_does_not_move_a_mean_and_a_lasting_change_does() -> None:
    mean = RunningMean()
    for _ in range(20):
        mean.observe(1.0)
    mean.observe(100.0)
    assert mean.mean == pytest.approx(1.0, abs=0.05)
    for _ in range(100):
        mean.observe(3.0)
    assert mean.mean == pytest.approx(3.0, rel=0.1)


def test_a_slow_first_observation_is_forgotten() -> None:
    mean = RunningMean()
    for value in (35.0, 5.0, 5.1):
        mean.observe(value)
    assert mean.mean < 6


def test_a_curve_keeps_what_it_saw_in_another_state() -> None:
    curve = Curve(0.5)
    for _ in range(10):
        curve.observe(64, 0.040)
    for _ in range(500):
        curve.observe(1, 0.010)
    assert curve.knots()(64) == pytest.approx(0.040)


def test_draft_time_by_length_is_learned_under_noise() -> None:
    rng = random.Random(2)
    model = DrafterModel()
    for _ in range(300):
        length = rng.choice([2, 4, 5, 8])
        model.observe_draft(length, _noisy(rng, 0.002 + 0.001 * length))
    for length in (1, 3, 6, 8, 12):
        assert model.knots()(length) == pytest.approx(0.002 + 0.001 * length, rel=0.2)


@pytest.mark.parametrize("acceptance", [0.05, 0.5, 0.8, 0.95])
def test_acceptance_comes_near_the_truth(acceptance: float) -> None:
    rng = random.Random(3)
    found = []
    for _ in range(20):
        sequence = Acceptance(DrafterAcceptance())
        for _ in range(80):
            sequence.observe(_block(rng, acceptance, 6))
        found.append(sequence.rate)
    assert sum(found) / len(found) == pytest.approx(acceptance, abs=0.07)


def test_a_change_is_noticed_in_a_few_rounds_both_ways() -> None:
    rng = random.Random(4)
    sequence = Acceptance(DrafterAcceptance())
    for _ in range(60):
        sequence.observe(_block(rng, 0.9, 8))
    for _ in range(6):
        sequence.observe(_block(rng, 0.02, 8))
    assert sequence.rate < 0.2
    for _ in range(60):
        sequence.observe(_block(rng, 0.05, 4))
    for _ in range(4):
        sequence.observe(_block(rng, 0.95, 4))
    assert sequence.rate > 0.7


def test_what_one_sequence_learned_is_the_prior_of_the_next() -> None:
    rng = random.Random(5)
    drafter = DrafterAcceptance()
    first = Acceptance(drafter)
    for _ in range(60):
        first.observe(_block(rng, 0.02, 4))
    assert Acceptance(drafter).rate < 0.15


def test_a_depth_that_is_harder_is_seen_to_be() -> None:
    rng = random.Random(6)
    sequence = Acceptance(DrafterAcceptance())
    for _ in range(400):
        trials = []
        for depth in range(4):
            trials.append(Trial(0 if rng.random() < (0.95, 0.9, 0.5, 0.9)[depth] else None))
            if trials[-1].rank is None:
                break
        sequence.observe(BlockOutcome(tuple(trials)))
    rates = sequence.by_depth(4)
    assert min(rates) == rates[2]
    assert rates[0] - rates[2] > 0.2


def test_the_log_decides_about_a_block_once_it_is_long_enough() -> None:
    tree = CandidateTree((7, 8, 9, 5), (-1, -1, 1, 2))
    assert outcome(tree, [8]) is None
    assert outcome(tree, [8, 9, 4]) == BlockOutcome((Trial(1, 2), Trial(0, 1), Trial(None, 1)))
    assert outcome(tree, [8, 9, 5, 1]) == BlockOutcome((Trial(1, 2), Trial(0, 1), Trial(0, 1)), full=True)
    assert outcome(tree, [6]) == BlockOutcome((Trial(None, 2),))


def _tokens_until_due(probing: Probing) -> int:
    tokens = 0
    while not probing.due:
        probing.passed(1)
        tokens += 1
    probing.started()
    assert probing.waiting
    return tokens


def test_probes_are_apart_by_uneven_steps_and_a_promising_one_is_followed_at_once() -> None:
    """Even steps through a text that repeats itself would always meet the same place."""
    probing = Probing()
    first = _tokens_until_due(probing)
    waits = []
    for _ in range(60):
        probing.failed()
        waits.append(_tokens_until_due(probing))
    assert 0.75 * FIRST <= first <= 1.25 * FIRST
    assert min(waits) >= 0.75 * LATER
    assert statistics.mean(waits) == pytest.approx(LATER, rel=0.1)
    assert {wait % 8 for wait in waits} == set(range(8))
    probing.promising()
    assert probing.due
    assert probing.urgent


def test_probes_take_a_small_share_of_the_time_and_a_smaller_one_the_more_have_failed() -> None:
    shares = []
    for failures in (0, 20, 100, 1000):
        target, drafter = TargetModel(), DrafterModel()
        drafter.failed_probes = failures
        for _ in range(8):
            drafter.probe_cost.observe(0.05)
        drafter.probes("a sequence", target, 2)
        drafter.leave("a sequence")
        while not drafter.may_probe(target):
            target.observe(TargetStep(0.1, 1, 10))
        shares.append(0.05 / target.busy)
    assert shares == sorted(shares, reverse=True)
    assert 0.02 < shares[0] <= 0.04
    assert shares[-1] < 0.004


def test_a_probe_that_holds_nobody_up_may_be_followed_by_another() -> None:
    target, drafter = TargetModel(), DrafterModel()
    drafter.probe_cost.observe(-0.001)
    drafter.probes("a sequence", target, 2)
    assert not drafter.may_probe(target)
    drafter.leave("a sequence")
    assert drafter.may_probe(target)


def test_a_probe_that_is_never_answered_is_given_up() -> None:
    probing = Probing()
    probing.started()
    for _ in range(4 * LATER + 1):
        probing.passed(1)
    assert not probing.waiting


def test_probes_of_slow_drafters_are_short() -> None:
    assert probe_length(lambda length: 0.001 * length, 0.010) == 4
    assert probe_length(lambda length: 0.040 * length, 0.100) == 1
