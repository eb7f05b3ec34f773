"""What the goodput policy tells a drafter that knows how sure it is, and how long it lets it draft."""

from __future__ import annotations

from specdec.costs import DrafterModel, TargetModel, TargetStep
from specdec.decision import Decision
from specdec.goodput_policy import GoodputPolicy, Limits
from specdec.observations import BlockOutcome, Round, Trial

VERIFY, PER_CANDIDATE = 0.1, 0.02


def _decision(confidence: float | None = None, max_draft_time: float = 1.0, duration: float = 0.3) -> Decision:
    """After blocks that were mostly right; drafting costs by the candidate, verifying hardly. duration: of a round."""
    target, drafter = TargetModel(), DrafterModel()
    policy = GoodputPolicy(Limits(max_draft_length=16, max_window=1, max_draft_time=max_draft_time))
    policy.attach(target, drafter)
    for _ in range(8):
        target.observe(TargetStep(VERIFY, 1, 10))
        target.observe(TargetStep(VERIFY, 17, 10))
        for length in (1, 4, 16):
            drafter.observe_draft(length, PER_CANDIDATE * length)
    for i in range(30):
        right = 6 + i % 7
        policy.decide()
        policy.observe(BlockOutcome((*[Trial(0, 1, confidence)] * right, Trial(None, 1, confidence))))
        policy.observe(Round(10, 9, 10, duration))
    return policy.decide()


def test_a_block_is_no_longer_than_can_be_drafted_in_time() -> None:
    free, hurried = _decision(), _decision(max_draft_time=3.5 * PER_CANDIDATE)
    assert free.draft_length > 3
    assert 1 < hurried.draft_length <= 3


def test_only_a_drafter_that_says_how_sure_it_is_is_told_where_to_stop() -> None:
    silent, sure = _decision(), _decision(confidence=0.9)
    assert silent.min_confidence == 0.0
    assert 0.0 < sure.min_confidence < 1.0
    assert sure.draft_length >= silent.draft_length  # it may go on where it is sure


def test_the_faster_the_rounds_really_are_the_surer_it_must_be() -> None:
    fast, slow = (_decision(confidence=0.9, duration=seconds) for seconds in (0.3, 0.6))
    assert slow.min_confidence < 0.7 * fast.min_confidence  # at half the rate
