"""What a log line carries beside its words, and what is taken out of it before anybody reads it."""

from __future__ import annotations

import traceback
from collections.abc import MutableMapping
from typing import Any

from services.telemetry.tracing_context import current_call, parse
from specdec.log_extra import PRIVATE

LEFT_OUT = "(its message may hold parts of a request: set log_prompts to see it)"
_SERVING = ("uvicorn", "grpc", "asyncio")
"""Loggers of libraries that tell of whatever raised while they served."""

Event = MutableMapping[str, Any]


def add_trace(logger: Any, name: str, event: Event) -> Event:
    """The trace that the line belongs to: that of the sequence it names, or of the call that is being answered."""
    context = parse(event.pop("traceparent", "") or "")
    if context is None and (call := current_call.get()) is not None:
        context = call.context
    if context is not None:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


def hide_content(logger: Any, name: str, event: Event) -> Event:
    """Of an error that was raised while a request was served only the class and the place are told."""
    library = str(event.get("logger", "")).split(".")[0] in _SERVING
    private = event.pop(PRIVATE, False)
    error = _raised(event)
    if error is not None and (library or private):
        event.pop("exc_info", None)
        event["exception"] = without_messages(error)
    if library:  # they repeat the error, and what it was about, in lines of their own
        event["event"] = str(event.get("event", "")).split("\n")[0]
    return event


def show_content(logger: Any, name: str, event: Event) -> Event:
    """In the place of `hide_content` where users' texts may be logged."""
    event.pop(PRIVATE, None)
    return event


def without_messages(error: BaseException) -> str:
    """The traceback of `error` and of those that caused it; values are in none of its lines."""
    lines: list[str] = []
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    for one in reversed(chain):
        lines += traceback.format_tb(one.__traceback__)
        lines.append(f"{type(one).__module__}.{type(one).__qualname__}: {LEFT_OUT}\n")
    return "".join(lines).rstrip("\n")


def _raised(event: Event) -> BaseException | None:
    told = event.get("exc_info")
    if isinstance(told, BaseException):
        return told
    if isinstance(told, tuple):
        return told[1] if isinstance(told[1], BaseException) else None
    return None
