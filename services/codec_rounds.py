"""Journals and figures, to the wire. No token ids: what was written is nobody's but the asker's."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from outrider.v1 import control_service_pb2 as pb
from scheduler.entries import Draft, Dropped, Ended, FellBack, Placed, Step
from services import codec
from services.rounds import Later, SequenceRounds
from services.rounds_figures import Figures
from specdec.goodput import Explained


def encode_rounds(rounds: SequenceRounds, to_wall: float) -> pb.SequenceRounds:
    """to_wall: seconds from the monotonic clock to the Unix epoch."""
    admitted = rounds.admitted
    message = pb.SequenceRounds(
        sequence_id=admitted.sequence_id,
        request_id=admitted.request_id,
        model=admitted.model,
        prompt_tokens=admitted.prompt_tokens,
        admitted_at=Timestamp(),
        entries=[_entry(entry, admitted.at) for entry in rounds.entries],
        forgotten=rounds.forgotten,
    )
    message.admitted_at.FromNanoseconds(round((admitted.at + to_wall) * 1e9))
    return message


def encode_figures(figures: Figures) -> pb.GetFiguresResponse:
    counts = figures.counts
    return pb.GetFiguresResponse(
        seconds=round(figures.seconds),
        tokens_per_second=figures.tokens_per_second,
        tokens_per_verify=figures.tokens_per_verify,
        acceptance_rate=figures.acceptance_rate,
        acceptance_per_position=figures.acceptance_per_position,
        speculative_rate=figures.speculative_rate,
        plain_rate=figures.plain_rate,
        expected_rate=figures.expected_rate,
        expected_plain_rate=figures.expected_plain_rate,
        mode=figures.mode,
        reason=figures.reason,
        rounds=counts.rounds,
        plain_steps=counts.plain_steps,
        ahead_rounds=counts.ahead_rounds,
        stale_blocks=counts.stale_blocks,
        fallbacks=counts.fallbacks,
    )


def _entry(entry: Later, since: float) -> pb.SequenceEntry:
    message = pb.SequenceEntry(at=entry.at - since)
    match entry:
        case Placed():
            message.placed.CopyFrom(_placement(entry))
        case Step():
            message.step.CopyFrom(_step(entry, since))
        case Dropped(draft=draft):
            message.stale.CopyFrom(pb.StaleDraft(draft=_draft(draft, since) if draft else None))
        case FellBack(reason=reason):
            message.fell_back.CopyFrom(pb.Fallback(reason=reason))
        case Ended():
            message.ended.CopyFrom(_end(entry))
    return message


def _placement(placed: Placed) -> pb.Placement:
    return pb.Placement(
        epoch=placed.epoch,
        length=placed.length,
        target_worker=placed.target_worker,
        draft_worker=placed.draft_worker,
        cause=placed.cause,
    )


def _end(ended: Ended) -> pb.SequenceEnd:
    return pb.SequenceEnd(
        completion_tokens=ended.completion_tokens,
        finish_reason=codec.encode_finish_reason(ended.finish_reason),
        error=ended.error,
        mode=ended.speculation.mode,
    )


def _step(step: Step, since: float) -> pb.TargetStep:
    return pb.TargetStep(
        number=step.number,
        position=step.position,
        sources=codec.encode_sources(step.sources),
        began_at=step.began_at - since,
        step_time=step.step_time,
        batch_size=step.batch_size,
        num_draft_tokens=step.num_draft_tokens,
        target_worker=step.target_worker,
        draft=_draft(step.draft, since) if step.draft else None,
        decision=_decision(step.decision) if step.decision else None,
    )


def _draft(draft: Draft, since: float) -> pb.DraftTimes:
    return pb.DraftTimes(
        num_candidates=len(draft.candidates),
        draft_worker=draft.draft_worker,
        asked_at=None if draft.asked_at is None else draft.asked_at - since,
        arrived_at=draft.arrived_at - since,
        draft_time=draft.draft_time,
        ahead=draft.ahead,
    )


def _decision(explained: Explained) -> pb.DecisionReasons:
    inputs, decision = explained.inputs, explained.decision
    return pb.DecisionReasons(
        draft_length=decision.draft_length,
        width=decision.width,
        window=decision.window,
        probe=decision.probe,
        goodput=explained.goodput,
        plain=explained.plain,
        note=explained.note,
        acceptance=inputs.acceptance,
        verify_time=inputs.verify(inputs.other_rows + decision.rows),
        draft_time=0.0 if decision.off else inputs.draft(decision.draft_length),
        plain_time=inputs.verify(inputs.other_rows + 1),
        link=inputs.link,
        ahead=inputs.ahead,
        other_rows=inputs.other_rows,
        other_tokens=inputs.other_tokens,
        max_draft_length=inputs.max_draft_length,
    )
