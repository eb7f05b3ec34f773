"""The history checker: what clients saw, held against what a stream promises.

A client writes down every event of every request; `violations` wants contiguous positions, no repeats, equality with
the reference, exactly one terminal event with nothing behind it, and usage = delivered.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from scheduler.request import Event, Finished, Started, Tokens


class Terminal(Enum):
    FINISHED = "finished"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Delivered:
    """One token as a client saw it. position: counted from the end of the prompt."""

    position: int
    token_id: int
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A terminal event. usage: the tokens that it claims; None where it claims nothing."""

    terminal: Terminal
    at: float
    detail: str = ""
    usage: int | None = None


@dataclass(slots=True)
class RequestHistory:
    """Events of one request in the order of their arrival."""

    request_id: str
    events: list[Delivered | Ended] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Delivered)]

    @property
    def ends(self) -> list[Ended]:
        return [event for event in self.events if isinstance(event, Ended)]

    def see(self, event: Event) -> None:
        """Writes one event of a scheduler's stream down."""
        match event:
            case Tokens():
                self.deliver(event.position, event.token_ids)
            case Finished():
                self.end(Terminal.FINISHED, event.finish_reason.value, event.completion_tokens)
            case Started():
                pass

    def deliver(self, position: int, token_ids: Sequence[int], at: float | None = None) -> None:
        now = time.monotonic() if at is None else at
        self.events += [Delivered(position + i, token_id, now) for i, token_id in enumerate(token_ids)]

    def end(self, terminal: Terminal, detail: str = "", usage: int | None = None, at: float | None = None) -> None:
        self.events.append(Ended(terminal, time.monotonic() if at is None else at, detail, usage))


class History:
    """Histories of many requests, and the references they must equal."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestHistory] = {}
        self._references: dict[str, tuple[int, ...]] = {}

    def request(self, request_id: str) -> RequestHistory:
        return self.requests.setdefault(request_id, RequestHistory(request_id))

    def expect(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The whole output of a request that finishes; one that is cancelled or fails must deliver a prefix of it."""
        self._references[request_id] = tuple(token_ids)

    async def record(self, request_id: str, events: AsyncIterator[Event]) -> RequestHistory:
        """Writes a stream down until it ends. An error of the stream becomes its terminal event."""
        history = self.request(request_id)
        try:
            async for event in events:
                history.see(event)
        except Exception as error:
            history.end(Terminal.ERROR, f"{type(error).__name__}: {error}")
        return history

    def violations(self) -> list[str]:
        """What no stream may do, one line each; empty is good."""
        found: list[str] = []
        for history in self.requests.values():
            lines = [*_ends(history), *_positions(history), *_usage(history), *_order(history)]
            lines += _equality(history, self._references.get(history.request_id))
            found += [f"{history.request_id}: {line}" for line in lines]
        missing = self._references.keys() - self.requests.keys()
        return found + [f"{request_id}: no history" for request_id in sorted(missing)]


def _ends(history: RequestHistory) -> list[str]:
    if len(history.ends) != 1:
        return [f"{len(history.ends)} terminal events"]
    if not isinstance(history.events[-1], Ended):
        return ["tokens behind the terminal event"]
    return []


def _positions(history: RequestHistory) -> list[str]:
    lines: list[str] = []
    expected = 0
    for event in history.events:
        if isinstance(event, Ended):
            continue
        if event.position < expected:
            lines.append(f"position {event.position} repeated")
            continue
        if event.position > expected:
            lines.append(f"gap: position {event.position} came where {expected} was due")
        expected = event.position + 1
    return lines


def _usage(history: RequestHistory) -> list[str]:
    delivered = len(history.token_ids)
    return [
        f"usage {end.usage} but {delivered} delivered"
        for end in history.ends
        if end.usage is not None and end.usage != delivered
    ]


def _order(history: RequestHistory) -> list[str]:
    times = [event.at for event in history.events]
    return ["times run backwards"] if times != sorted(times) else []


def _equality(history: RequestHistory, reference: tuple[int, ...] | None) -> list[str]:
    if reference is None:
        return []
    seen = history.token_ids
    for position, (token_id, right) in enumerate(zip(seen, reference, strict=False)):
        if token_id != right:
            return [f"token {token_id} at position {position}, the reference has {right}"]
    if len(seen) > len(reference):
        return [f"{len(seen)} tokens, the reference has {len(reference)}"]
    finished = any(end.terminal is Terminal.FINISHED for end in history.ends)
    if finished and len(seen) < len(reference):
        return [f"finished with {len(seen)} tokens, the reference has {len(reference)}"]
    return []
