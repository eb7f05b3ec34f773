"""What a journal tells of one sequence, as values: for traces, the page and `outrider explain`.

`at` and every other time is in monotonic seconds of the scheduler's process, durations in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

from scheduler.request import SpeculationSummary
from specdec.candidates import CandidateTree
from specdec.commit import FinishReason, TokenSource
from specdec.goodput import Explained
from specdec.value import value


@value
class Admitted:
    """traceparent, tracestate: the context that the request came in, empty for none."""

    sequence_id: str
    at: float
    model: str
    prompt_tokens: int
    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""


@value
class Placed:
    """Sent to a target worker to be opened at `length` tokens. cause: why it left the one before, empty at first."""

    sequence_id: str
    at: float
    epoch: int
    length: int
    target_worker: str
    draft_worker: str = ""
    cause: str = ""


@value
class Draft:
    """A block of candidates as it went through the scheduler. asked_at None: drafted ahead, unasked. draft_time: what
    the draft worker computed."""

    base_length: int
    candidates: CandidateTree
    draft_worker: str
    asked_at: float | None
    arrived_at: float
    draft_time: float
    ahead: bool


@value
class Step:
    """One step of the target: a round if it verified candidates (`draft`), else a plain step.

    position: of its first token, counted from the end of the prompt. began_at: when the target was free for it and
    had it: the later of the commit before and the message. arrived_at: when the scheduler took its answer, which was
    committed at `at`. step_time: what the target computed; num_draft_tokens: how many candidates it verified;
    decision: what was decided last before it, if the policy gives reasons.
    """

    sequence_id: str
    at: float
    epoch: int
    number: int
    position: int
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    began_at: float
    arrived_at: float
    step_time: float
    batch_size: int
    num_draft_tokens: int
    target_worker: str
    draft: Draft | None = None
    decision: Explained | None = None

    @property
    def accepted(self) -> int:
        return self.sources.count(TokenSource.ACCEPTED)


@value
class Dropped:
    """A block was stale. draft None: it was dropped before it was forwarded, or is no longer known."""

    sequence_id: str
    at: float
    draft: Draft | None = None


@value
class FellBack:
    sequence_id: str
    at: float
    reason: str


@value
class Ended:
    """finish_reason None: it was cancelled or failed, `error` says how: the name of the error, or `cancelled`."""

    sequence_id: str
    at: float
    completion_tokens: int
    finish_reason: FinishReason | None
    speculation: SpeculationSummary
    error: str = ""
    message: str = ""


Entry = Union[Admitted, Placed, Step, Dropped, FellBack, Ended]
Reader = Callable[[Entry], None]
"""Called on the scheduler's event loop for each entry, in order. Must be quick and must not raise."""
