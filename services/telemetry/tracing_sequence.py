"""From the journal of one sequence to its spans.

A sequence is one span `request` with the children `queue`, `prefill`, `spec.draft`, `spec.verify`, `spec.commit` and
`failover`. Its id is the sequence's own, so that whoever knows the sequence knows its span.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.entries import Admitted, Draft, Dropped, Ended, Entry, FellBack, Placed, Step
from services.telemetry.tracing_context import TraceContext, span_id_of
from services.telemetry.tracing_span import Attribute, Attributes, FinishedSpan, Moment, wall_clock

MAX_MOMENTS = 64
"""Events of one `request` span; fallbacks beyond them are counted in its attributes only."""
CANCELLED = "cancelled"


class SequenceSpans:
    """`of` for each entry in turn gives the spans that it completes; the last one gives `request` itself."""

    def __init__(self, admitted: Admitted, parent: TraceContext) -> None:
        self._admitted = admitted
        self._parent = parent
        self._own = parent.child(span_id_of(admitted.sequence_id))
        self._clock = wall_clock()
        self._placed: Placed | None = None
        self._first_token_due = False
        self._still_since = admitted.at
        self._moments: list[Moment] = []
        self.omitted = 0
        """Entries that were not kept, and so have no spans."""

    def of(self, entry: Entry) -> Iterator[FinishedSpan]:
        if isinstance(entry, Step):
            yield from self._step(entry)
        elif isinstance(entry, Placed):
            yield from self._place(entry)
        elif isinstance(entry, Dropped):
            yield from self._drop(entry)
        elif isinstance(entry, FellBack):
            self._note("fallback", entry.at, {"spec_decode.reason": entry.reason})
        elif isinstance(entry, Ended):
            yield from self._end(entry)

    def _place(self, placed: Placed) -> Iterator[FinishedSpan]:
        """The first placement ends the wait in the queue; each further one is a failover."""
        before, self._placed = self._placed, placed
        self._first_token_due = True
        if before is None:
            yield self._span("queue", self._admitted.at, placed.at, {"outrider.target_worker": placed.target_worker})
        else:
            attributes: Attributes = {
                "spec_decode.epoch": placed.epoch,
                "outrider.cause": placed.cause,
                "outrider.from_worker": before.target_worker,
                "outrider.target_worker": placed.target_worker,
            }
            yield self._span("failover", self._still_since, placed.at, attributes)

    def _step(self, step: Step) -> Iterator[FinishedSpan]:
        self._still_since = step.at
        if self._first_token_due and self._placed is not None:
            self._first_token_due = False
            yield self._prefill(self._placed, step)
        shared = _of_step(step)
        if step.draft is not None:
            yield self._draft(step.draft, {**shared, "spec_decode.stale": False})
        timed = {"outrider.step_time": step.step_time, "outrider.batch_size": step.batch_size}
        yield self._span("spec.verify", step.began_at, step.arrived_at, {**shared, **timed})
        yield self._span("spec.commit", step.arrived_at, step.at, shared)

    def _prefill(self, placed: Placed, first: Step) -> FinishedSpan:
        """From the opening to the first token: the forward that ends a prefill also decides a token."""
        attributes: Attributes = {
            "spec_decode.epoch": placed.epoch,
            "outrider.log_length": placed.length,
            "outrider.target_worker": placed.target_worker,
        }
        return self._span("prefill", placed.at, first.at, attributes)

    def _drop(self, dropped: Dropped) -> Iterator[FinishedSpan]:
        if dropped.draft is None:
            self._note("stale_block", dropped.at, {})
            return
        epoch = self._placed.epoch if self._placed else 0
        attributes: Attributes = {
            "spec_decode.draft_length": dropped.draft.candidates.draft_length,
            "spec_decode.accepted": 0,
            "spec_decode.mode": "speculative",
            "spec_decode.epoch": epoch,
            "spec_decode.draft_worker": dropped.draft.draft_worker,
            "spec_decode.stale": True,
        }
        yield self._draft(dropped.draft, attributes)

    def _draft(self, draft: Draft, attributes: Attributes) -> FinishedSpan:
        """From asking for the block to having it; of one drafted unasked, the time that the drafter told."""
        began = draft.arrived_at - draft.draft_time if draft.asked_at is None else draft.asked_at
        own = {"outrider.draft_time": draft.draft_time, "spec_decode.ahead": draft.ahead}
        return self._span("spec.draft", min(began, draft.arrived_at), draft.arrived_at, {**attributes, **own})

    def _end(self, ended: Ended) -> Iterator[FinishedSpan]:
        if self._placed is None:
            yield self._span("queue", self._admitted.at, ended.at, {})
        failed = bool(ended.error) and ended.error != CANCELLED
        yield FinishedSpan(
            "request",
            self._own,
            self._parent,
            self._admitted.at + self._clock,
            ended.at + self._clock,
            {**self._of_request(ended), **({"error.type": ended.error} if failed else {})},
            error=f"{ended.error}: {ended.message}" if failed else "",
            moments=tuple(self._moments),
        )

    def _of_request(self, ended: Ended) -> dict[str, Attribute]:
        admitted, speculation = self._admitted, ended.speculation
        reason = ended.finish_reason.value if ended.finish_reason is not None else ended.error
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": admitted.model,
            "gen_ai.response.model": admitted.model,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": admitted.prompt_tokens,
            "gen_ai.usage.output_tokens": ended.completion_tokens,
            "outrider.sequence_id": admitted.sequence_id,
            "spec_decode.mode": speculation.mode,
            "spec_decode.num_drafts": speculation.num_drafts,
            "spec_decode.num_draft_tokens": speculation.num_draft_tokens,
            "spec_decode.num_accepted_tokens": speculation.num_accepted_tokens,
            "spec_decode.num_failovers": speculation.num_failovers,
            "spec_decode.num_fallbacks": sum(speculation.fallbacks.values()),
        }
        if admitted.request_id:
            attributes["outrider.request_id"] = admitted.request_id
        if self.omitted:
            attributes["outrider.omitted_entries"] = self.omitted
        return attributes

    def _note(self, name: str, at: float, attributes: Attributes) -> None:
        if len(self._moments) < MAX_MOMENTS:
            self._moments.append(Moment(name, at + self._clock, attributes))

    def _span(self, name: str, began: float, ended: float, attributes: Attributes) -> FinishedSpan:
        clock = self._clock
        return FinishedSpan(name, self._own.child(), self._own, began + clock, ended + clock, attributes)


def _of_step(step: Step) -> dict[str, Attribute]:
    """draft_length: candidates that were verified, on the longest path where it is known."""
    draft = step.draft
    return {
        "spec_decode.draft_length": draft.candidates.draft_length if draft else step.num_draft_tokens,
        "spec_decode.accepted": step.accepted,
        "spec_decode.mode": "speculative" if step.num_draft_tokens else "plain",
        "spec_decode.epoch": step.epoch,
        "spec_decode.draft_worker": draft.draft_worker if draft else "",
        "spec_decode.tokens": len(step.token_ids),
        "spec_decode.position": step.position,
        "outrider.target_worker": step.target_worker,
    }
