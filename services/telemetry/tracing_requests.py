"""Which sequences are recorded: those that were sampled, as they go on, and of the others those that failed or were
slow, as they end.

For the latter the journal is kept meanwhile: its beginning and its end, so that a long answer fills no memory. Spans
are made from the entries when the event loop has time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.entries import Admitted, Ended, Entry
from services.telemetry.tracing_context import Call, parse
from services.telemetry.tracing_later import Later
from services.telemetry.tracing_sequence import CANCELLED, SequenceSpans
from services.telemetry.tracing_span import SpanSink

FIRST_ENTRIES = 64
LAST_ENTRIES = 64
"""Kept of a sequence that was not sampled. About 0.1 MB."""

CallOf = Callable[[int], Call | None]
"""The call that is being answered, by the id of its span."""


@dataclass(slots=True)
class _Kept:
    """The journal of a sequence that was not sampled."""

    first: list[Entry] = field(default_factory=list)
    last: deque[Entry] = field(default_factory=lambda: deque(maxlen=LAST_ENTRIES))
    omitted: int = 0

    def add(self, entry: Entry) -> None:
        if len(self.first) < FIRST_ENTRIES:
            self.first.append(entry)
            return
        self.omitted += len(self.last) == LAST_ENTRIES
        self.last.append(entry)


@dataclass(slots=True)
class _Recording:
    """kept None: the sequence is sampled, and its spans are made as it goes on."""

    admitted: Admitted
    spans: SequenceSpans
    call_id: int
    kept: _Kept | None


class RequestTraces:
    """A reader of the journal. Sequences whose calls nobody traces have no context, and are not looked at."""

    def __init__(self, sink: SpanSink, slow_seconds: float, call_of: CallOf) -> None:
        self._sink = sink
        self._slow_seconds = slow_seconds
        self._call_of = call_of
        self._recordings: dict[str, _Recording] = {}
        self._later: Later[tuple[SequenceSpans, Entry]] = Later(self._record)

    def __call__(self, entry: Entry) -> None:
        if isinstance(entry, Admitted):
            self._begin(entry)
            return
        recording = self._recordings.get(entry.sequence_id)
        if recording is None:
            return
        if recording.kept is None:
            self._later.put((recording.spans, entry))
        else:
            recording.kept.add(entry)
        if isinstance(entry, Ended):
            self._end(recording, entry)

    def flush(self) -> None:
        """Puts all spans that are due."""
        self._later.flush()

    def _begin(self, admitted: Admitted) -> None:
        parent = parse(admitted.traceparent, admitted.tracestate)
        if parent is None:
            return
        kept = None if parent.sampled else _Kept()
        spans = SequenceSpans(admitted, parent)
        self._recordings[admitted.sequence_id] = _Recording(admitted, spans, parent.span_id, kept)
        call = self._call_of(parent.span_id)
        if call is not None:
            call.running += 1

    def _end(self, recording: _Recording, ended: Ended) -> None:
        del self._recordings[ended.sequence_id]
        failed = ended.error not in ("", CANCELLED)
        call = self._call_of(recording.call_id)
        if call is not None:
            call.error = call.error or ended.error * failed
            whole = ended.finish_reason is not None
            call.finished += whole
            call.running -= whole
        kept = recording.kept
        if kept is None or not (failed or ended.at - recording.admitted.at >= self._slow_seconds):
            return
        if call is not None:
            call.kept = True
        recording.spans.omitted = kept.omitted
        for entry in (*kept.first, *kept.last):
            self._later.put((recording.spans, entry))

    def _record(self, due: tuple[SequenceSpans, Entry]) -> None:
        spans, entry = due
        for span in spans.of(entry):
            self._sink.put(span)
