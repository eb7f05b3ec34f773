"""Where in which trace something happens, as W3C Trace Context writes it, and the call that is being answered."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NO_VERSION = "ff"
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place. state: what other tracing systems want passed on (`tracestate`)."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def child(self, span_id: int | None = None) -> TraceContext:
        """A span below this one."""
        return TraceContext(self.trace_id, new_span_id() if span_id is None else span_id, self.sampled, self.state)


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """None for what is no context: the standard wants it ignored."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or match[1] == _NO_VERSION:
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED), tracestate)


def new_trace(ratio: float) -> TraceContext:
    """The first span of a trace. Sampled with probability `ratio`, by the trace id, as OpenTelemetry's own sampler
    does, so that others who look at the same trace decide the same."""
    trace_id = random.getrandbits(128) or 1
    return TraceContext(trace_id, new_span_id(), (trace_id & (2**64 - 1)) < round(ratio * 2**64))


def span_id_of(sequence_id: str) -> int:
    """Of a sequence's `request` span: the scheduler names sequences by 16 hexadecimal digits."""
    return int(sequence_id, 16)


def new_span_id() -> int:
    return random.getrandbits(64) or 1


@dataclass(slots=True)
class Call:
    """One call that is being answered: the span above its sequences. parent None: nobody told of one. started: seconds
    since the epoch. kept: one of its sequences was exported for what became of it, so the call must be too. error: how
    one of its sequences failed. running, finished: of its sequences."""

    context: TraceContext
    parent: TraceContext | None
    started: float
    kept: bool = False
    error: str = ""
    running: int = 0
    finished: int = 0

    @property
    def answered(self) -> bool:
        """All that was asked for is told; a caller that hangs up now has not cancelled."""
        return self.finished > 0 and self.running == 0


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""Set around a call by those who receive it, and read by the gateway."""
