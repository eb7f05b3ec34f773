"""What happened to one sequence as spans: each entry's own, with its times and what it was about."""

from __future__ import annotations

import time

import pytest

from scheduler.entries import Admitted, Draft, Dropped, Ended, Entry, FellBack, Placed, Step
from scheduler.request import SpeculationSummary
from services.telemetry.tracing_context import TraceContext
from services.telemetry.tracing_sequence import MAX_MOMENTS, SequenceSpans
from services.telemetry.tracing_span import FinishedSpan
from specdec.candidates import CandidateTree
from specdec.commit import FinishReason, TokenSource

NAME = "00000000000000ab"
ADMITTED = Admitted(NAME, 1.0, "m", 3)
PLACED = Placed(NAME, 2.0, 7, 3, "target-0", "draft-0")
DRAFT = Draft(3, CandidateTree.chain((4, 5)), "draft-0", asked_at=3.0, arrived_at=4.0, draft_time=0.25, ahead=False)
STEP = Step(
    sequence_id=NAME,
    at=6.5,
    epoch=7,
    number=1,
    position=0,
    token_ids=(4, 6),
    sources=(TokenSource.ACCEPTED, TokenSource.CORRECTION),
    began_at=5.0,
    arrived_at=6.0,
    step_time=0.5,
    batch_size=2,
    num_draft_tokens=2,
    target_worker="target-0",
    draft=DRAFT,
)
ENDED = Ended(NAME, 8.0, 2, FinishReason.LENGTH, SpeculationSummary())
ROUND = {
    "spec_decode.draft_length": 2,
    "spec_decode.accepted": 1,
    "spec_decode.mode": "speculative",
    "spec_decode.epoch": 7,
    "spec_decode.draft_worker": "draft-0",
}


def _spans(*entries: Entry) -> list[FinishedSpan]:
    made = SequenceSpans(ADMITTED, TraceContext(1, 2, True))
    return [span for entry in entries for span in made.of(entry)]


def _times(span: FinishedSpan) -> tuple[float, float]:
    """In the seconds of the journal."""
    clock = time.time() - time.monotonic()
    return round(span.began - clock, 2), round(span.ended - clock, 2)


def test_a_round_is_a_draft_a_verify_and_a_commit() -> None:
    spans = {span.name: span for span in _spans(PLACED, STEP, ENDED)}
    assert {name: _times(span) for name, span in spans.items()} == {
        "queue": (1.0, 2.0),
        "prefill": (2.0, 6.5),
        "spec.draft": (3.0, 4.0),
        "spec.verify": (5.0, 6.0),
        "spec.commit": (6.0, 6.5),
        "request": (1.0, 8.0),
    }
    for name in ("spec.draft", "spec.verify", "spec.commit"):
        assert ROUND.items() <= spans[name].attributes.items()
    assert spans["spec.draft"].attributes["outrider.draft_time"] == 0.25
    assert spans["spec.verify"].attributes["outrider.step_time"] == 0.5
    request = spans.pop("request")
    assert {span.parent for span in spans.values()} == {request.context}
    assert request.context == TraceContext(1, 0xAB, True)
    assert request.parent == TraceContext(1, 2, True)


def test_a_block_that_was_stale_is_a_draft_without_a_verify() -> None:
    (queue, stale) = _spans(PLACED, Dropped(NAME, 5.0, DRAFT))
    assert (queue.name, stale.name) == ("queue", "spec.draft")
    assert {**ROUND, "spec_decode.accepted": 0, "spec_decode.stale": True}.items() <= stale.attributes.items()
    assert _times(stale) == (3.0, 4.0)


def test_fallbacks_and_unseen_blocks_are_events_of_the_request_and_not_without_end() -> None:
    *_, request = _spans(PLACED, FellBack(NAME, 3.0, "late"), Dropped(NAME, 4.0), ENDED)
    assert [moment.name for moment in request.moments] == ["fallback", "stale_block"]
    assert request.moments[0].attributes == {"spec_decode.reason": "late"}
    *_, request = _spans(PLACED, *[FellBack(NAME, 3.0, "late")] * (2 * MAX_MOMENTS), ENDED)
    assert len(request.moments) == MAX_MOMENTS


@pytest.mark.parametrize(("error", "told"), [("Unavailable", "Unavailable: no target"), ("cancelled", "")])
def test_a_request_that_was_never_placed_waited_to_its_end(error: str, told: str) -> None:
    queue, request = _spans(Ended(NAME, 4.0, 0, None, SpeculationSummary(), error, "no target"))
    assert (queue.name, _times(queue)) == ("queue", (1.0, 4.0))
    assert (request.name, request.error) == ("request", told)
    assert request.attributes["gen_ai.response.finish_reasons"] == (error,)


def test_after_a_failover_there_is_a_prefill_again() -> None:
    moved = Placed(NAME, 7.0, 8, 5, "target-1", "draft-0", "lost")
    later = Step(NAME, 7.5, 8, 2, 2, (9,), (TokenSource.PLAIN,), 7.0, 7.4, 0.1, 1, 0, "target-1")
    spans = _spans(PLACED, STEP, moved, later, ENDED)
    (failover,) = [span for span in spans if span.name == "failover"]
    assert _times(failover) == (6.5, 7.0)
    attributes = {"outrider.cause": "lost", "outrider.from_worker": "target-0", "outrider.target_worker": "target-1"}
    assert {**attributes, "spec_decode.epoch": 8}.items() <= failover.attributes.items()
    prefills = [span for span in spans if span.name == "prefill"]
    assert [_times(span) for span in prefills] == [(2.0, 6.5), (7.0, 7.5)]
    assert prefills[1].attributes["outrider.log_length"] == 5
