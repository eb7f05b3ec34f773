"""A finished span as a value, and where it goes. Free of OpenTelemetry, which a process without tracing never loads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Union

from services.telemetry.tracing_context import TraceContext

Attribute = Union[str, int, float, bool, tuple[str, ...]]
Attributes = Mapping[str, Attribute]


class Kind(Enum):
    """SERVER: the answering of a call from another process."""

    INTERNAL = "internal"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of a span; at: seconds since the epoch."""

    name: str
    at: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """began, ended: seconds since the epoch. error: why it failed; empty if it did not."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    began: float
    ended: float
    attributes: Attributes
    kind: Kind = Kind.INTERNAL
    error: str = ""
    moments: tuple[Moment, ...] = ()


class SpanSink(Protocol):
    """Takes a span that is to be recorded, whatever its own context says. Never blocks and never fails."""

    def put(self, span: FinishedSpan) -> None: ...


def wall_clock() -> float:
    """What to add to monotonic seconds to get seconds since the epoch."""
    return time.time() - time.monotonic()
