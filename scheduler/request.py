"""A request as the scheduler takes it, and the events that answer it. The gateway has already made tokens of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from specdec.commit import FinishReason, TokenSource
from specdec.messages import Committed, TokenLogprobs
from specdec.params import NO_REPORT, Report, SamplingParams
from specdec.value import value


class Speculation(Enum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Watcher(Protocol):
    """Text-level stops: the gateway's eyes on one sequence. Sees every token once, in order."""

    def ends_after(self, token_ids: Sequence[int]) -> int | None:
        """How many of these committed tokens the answer keeps, at least 1, if its text ends here; None to go on."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """model: empty is the only one served. max_tokens None: what is left of the context. timeout: seconds from now.

    sampling.seed is resolved: the gateway drew one where the user gave none. stop_token_ids: all that apply, the
    model's own included unless the user asked to ignore them. watcher: ends the sequence where its text ends.
    traceparent, tracestate: the trace that it belongs to, empty for none. traced: somebody makes a span of the
    sequence, below that of traceparent, and its workers' spans belong below that one.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    report: Report = NO_REPORT
    watcher: Watcher | None = None
    speculation: Speculation = Speculation.AUTO
    draft_length: int | None = None
    timeout: float | None = None
    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    traced: bool = False


@value
class Started:
    sequence_id: str
    model: str
    seed: int
    prompt_tokens: int


@value
class Tokens:
    """Committed tokens, in order and without gaps. position: of the first, counted from the end of the prompt.
    logprobs, margins: one per token if the report asks for them."""

    position: int
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    prefix_digest: bytes
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()


@dataclass(slots=True)
class SpeculationSummary:
    """What speculation did for one sequence. A *round* is one draft + verify."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = field(default_factory=list)
    num_plain_steps: int = 0
    num_speculative_tokens: int = 0
    """Tokens committed by verifies that had candidates."""
    drafted_per_step: list[int] = field(default_factory=list)
    """Of each verify that had candidates, in order; so is accepted_per_step."""
    accepted_per_step: list[int] = field(default_factory=list)
    num_failovers: int = 0
    num_stale_blocks: int = 0
    num_ahead_hits: int = 0
    num_ahead_misses: int = 0
    num_fan_out_hits: int = 0
    """Of blocks drafted in case that the target leaves the likeliest path; not among the ahead hits."""
    num_fan_out_misses: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def count(self, committed: Committed) -> int:
        """Adds what one step of the target committed. Returns how many candidates were accepted."""
        if not committed.num_draft_tokens:
            self.num_plain_steps += 1
            return 0
        accepted = committed.sources.count(TokenSource.ACCEPTED)
        self.num_drafts += 1
        self.num_draft_tokens += committed.num_draft_tokens
        self.num_accepted_tokens += accepted
        self.num_speculative_tokens += len(committed.token_ids)
        self.drafted_per_step.append(committed.num_draft_tokens)
        self.accepted_per_step.append(accepted)
        per_position = self.num_accepted_tokens_per_position
        if accepted > len(per_position):
            per_position += [0] * (accepted - len(per_position))
        for position in range(accepted):
            per_position[position] += 1
        return accepted

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per verify with candidates."""
        return self.num_speculative_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def mode(self) -> str:
        if not self.num_drafts:
            return "plain"
        return "mixed" if self.num_plain_steps else "speculative"


@value
class Finished:
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationSummary
    duration: float
    time_to_first_token: float


Event = Started | Tokens | Finished
