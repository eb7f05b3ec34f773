"""The threshold policy lengthens, shortens, switches off and comes back by probing."""

from __future__ import annotations

from specdec.draft_length import FixedPolicy, ThresholdPolicy


def _policy(length: int = 4) -> ThresholdPolicy:
    return ThresholdPolicy(length, max_draft_length=8, window=4, off_below=0.2, probe_after_tokens=10)


def _until_off(policy: ThresholdPolicy) -> int:
    rounds = 0
    while policy.draft_length():
        policy.observe_round(policy.draft_length(), 0)
        rounds += 1
    return rounds


def test_fixed_is_fixed() -> None:
    policy = FixedPolicy(5)
    policy.observe_round(5, 0)
    assert policy.draft_length() == 5


def test_full_acceptance_lengthens_up_to_the_maximum() -> None:
    policy = _policy()
    lengths = []
    for _ in range(6):
        policy.observe_round(policy.draft_length(), policy.draft_length())
        lengths.append(policy.draft_length())
    assert lengths == [5, 6, 7, 8, 8, 8]


def test_middling_acceptance_keeps_the_length() -> None:
    policy = _policy()
    for _ in range(5):
        policy.observe_round(4, 3)
    assert policy.draft_length() == 4


def test_low_acceptance_shortens_but_stays_on_above_the_floor() -> None:
    policy = _policy()
    for _ in range(12):
        policy.observe_round(4, 2)
    assert policy.draft_length() == 1


def test_no_acceptance_switches_off_after_a_full_window() -> None:
    assert _until_off(_policy()) == 4


def test_off_returns_by_a_short_probe_and_backs_off_when_it_fails() -> None:
    policy = _policy()
    _until_off(policy)
    policy.observe_plain(9)
    assert policy.draft_length() == 0
    policy.observe_plain(1)
    assert policy.draft_length() == 2
    policy.observe_round(2, 0)
    policy.observe_plain(19)
    assert policy.draft_length() == 0  # twice the wait
    policy.observe_plain(1)
    policy.observe_round(2, 2)
    assert policy.draft_length() == 2
    policy.observe_round(2, 2)
    assert policy.draft_length() == 3  # on again


def test_the_wait_between_probes_is_bounded() -> None:
    policy = _policy()
    _until_off(policy)
    for _ in range(20):
        policy.observe_plain(10_000)
        policy.observe_round(2, 0)
    policy.observe_plain(160)
    assert policy.draft_length() == 2
