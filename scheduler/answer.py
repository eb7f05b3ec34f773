"""What one sequence has answered so far: the tokens behind its prompt, as the events that tell of them."""

from __future__ import annotations

from dataclasses import replace

from scheduler.request import Event, Finished, GenerationRequest, SpeculationSummary, Tokens
from specdec.commit import FinishReason
from specdec.log import Log
from specdec.messages import Committed

_UNTOLD_EVENTS = 4
"""What a client may leave waiting before its sequence waits for it."""


class Answer:
    """Times are monotonic seconds."""

    def __init__(self, request: GenerationRequest, log: Log, started_at: float) -> None:
        """log: the prompt, which this alone appends to."""
        self._watcher = request.watcher
        self._log = log
        self._prompt_length = len(log)
        self._started_at = started_at
        self._first_token_at = 0.0
        self._events: list[Event] = []

    def new_part(self, base_length: int, body: Committed) -> Committed | None:
        """What the log does not have yet of tokens behind a base that it has. None if they are not the ones that it
        has, which were streamed."""
        known = len(self._log) - base_length
        if known and tuple(self._log.since(base_length)[: len(body.token_ids)]) != body.token_ids[:known]:
            return None
        return body.part(known)

    def cut(self, body: Committed) -> Committed:
        """Up to where the text ends, if it ends here; what the target committed beyond is dropped."""
        kept = self._watcher.ends_after(body.token_ids) if self._watcher else None
        return body if kept is None else replace(body.part(0, kept), finish_reason=FinishReason.STOP)

    def add(self, body: Committed, now: float) -> int:
        """Appends to the log. Returns the position of the first token, counted from the end of the prompt."""
        position = len(self._log) - self._prompt_length
        self._log.append(body.token_ids)
        self._first_token_at = self._first_token_at or now
        self._events.append(
            Tokens(position, body.token_ids, body.sources, self._log.digest, body.logprobs, body.margins)
        )
        return position

    @property
    def untold(self) -> int:
        """Events that were not taken yet."""
        return len(self._events)

    @property
    def waits_for_client(self) -> bool:
        """It is so slow that its sequence waits too."""
        return len(self._events) >= _UNTOLD_EVENTS

    def take(self) -> list[Event]:
        """The events that were not taken yet."""
        taken, self._events = self._events, []
        return taken

    def finished(self, reason: FinishReason, speculation: SpeculationSummary, now: float) -> Finished:
        return Finished(
            reason,
            self._prompt_length,
            len(self._log) - self._prompt_length,
            speculation,
            now - self._started_at,
            self._first_token_at - self._started_at,
        )
