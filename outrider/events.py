"""What a server tells, as frozen values. Durations are in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.v1 import control_service_pb2 as control
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2 as types


class TokenSource(Enum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    """A candidate that equalled the target's own token."""
    CORRECTION = "correction"
    """The target's token where no candidate equalled it."""
    BONUS = "bonus"
    """The target's token after the last candidate of a fully accepted path."""
    PLAIN = "plain"
    """Decoded without candidates."""
    UNKNOWN = "unknown"
    """Of a newer server."""


class FinishReason(Enum):
    STOP = "stop"
    """A stop token or a stop text."""
    LENGTH = "length"
    """The token budget or the context limit."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a choice. With `seed` it can be replayed exactly, unless accept_rule was rejection or block.

    index: which of the n choices, here and in the events below; those of several choices come mixed.
    """

    sequence_id: str
    model: str
    seed: int
    prompt_tokens: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """logprob: of the token itself. top: (token id, logprob) of the likeliest tokens, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Committed tokens, in order and without gaps. position: of the first, counted from the end of the prompt.

    sources and pieces: one per token; the pieces join to `text`. A piece is empty while a character is incomplete, or
    while it may begin a stop text. logprobs: one per token if asked for. Text without tokens is the echoed prompt, or
    what was held back to the end.
    """

    position: int
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    text: str
    pieces: tuple[str, ...]
    prefix_digest: bytes
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one request. mode: speculative, plain or mixed.

    acceptance_rate: accepted / drafted, None if nothing was drafted; mean_acceptance_length: committed tokens per
    verify that had candidates. fallbacks: how often speculation was left, by reason.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: tuple[int, ...]
    num_plain_steps: int
    mean_acceptance_length: float
    acceptance_rate: float | None
    mode: str
    num_failovers: int
    num_stale_blocks: int
    fallbacks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a choice. stop_text: the one that ended it, if one did. tool_calls: parsed from its text."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation
    duration: float
    time_to_first_token: float
    index: int = 0
    stop_text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


Event = Started | Tokens | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """The whole of one choice."""

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    started: Started
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: n choices, by index. What is asked of the answer itself is told of the first."""

    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        return self.choices[0].sources

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs

    @property
    def started(self) -> Started:
        return self.choices[0].started

    @property
    def finished(self) -> Finished:
        return self.choices[0].finished

    @classmethod
    def of(cls, events: Iterable[Event]) -> Completion:
        """From all events of an answer. Raises ValueError if a choice lacks its first or last one."""
        by_index: dict[int, list[Event]] = {}
        for event in events:
            by_index.setdefault(event.index, []).append(event)
        return cls(tuple(_choice(by_index[index]) for index in sorted(by_index)))


def _choice(events: Sequence[Event]) -> Choice:
    first, last = events[0], events[-1]
    if not isinstance(first, Started) or not isinstance(last, Finished):
        raise ValueError("a choice has no first or no last event")
    tokens = [event for event in events if isinstance(event, Tokens)]
    return Choice(
        text="".join(part.text for part in tokens),
        token_ids=tuple(token_id for part in tokens for token_id in part.token_ids),
        sources=tuple(source for part in tokens for source in part.sources),
        started=first,
        finished=last,
        logprobs=tuple(logprobs for part in tokens for logprobs in part.logprobs),
    )


@dataclass(frozen=True, slots=True)
class Model:
    """context_length: tokens of prompt and answer together."""

    name: str
    context_length: int
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class Worker:
    """role: target or draft. state: connecting, ready, refused, suspended, lost or draining; detail: why.

    lease_remaining: None for a worker from a static list.
    """

    worker_id: str
    role: str
    address: str
    state: str
    detail: str
    model: str
    drafter: str
    sequences: int
    lease_remaining: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """ready: requests can be served. metadata_state: connected, down or off."""

    ready: bool
    version: str
    workers: tuple[Worker, ...]
    active_sequences: int
    metadata_state: str
    uptime: float


_SOURCES = {
    types.TOKEN_SOURCE_ACCEPTED: TokenSource.ACCEPTED,
    types.TOKEN_SOURCE_CORRECTION: TokenSource.CORRECTION,
    types.TOKEN_SOURCE_BONUS: TokenSource.BONUS,
    types.TOKEN_SOURCE_PLAIN: TokenSource.PLAIN,
}
_FINISH_REASONS = {types.FINISH_REASON_STOP: FinishReason.STOP, types.FINISH_REASON_LENGTH: FinishReason.LENGTH}


def decode_event(message: pb.GenerateResponse) -> Event | None:
    """None for a kind of event that this version does not know."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(started.sequence_id, started.model, started.seed, started.prompt_tokens, started.index)
        case "tokens":
            tokens = message.tokens
            return Tokens(
                position=tokens.position,
                token_ids=tuple(tokens.token_ids),
                sources=tuple(_SOURCES.get(source, TokenSource.UNKNOWN) for source in tokens.sources),
                text=tokens.text,
                pieces=tuple(tokens.pieces),
                prefix_digest=tokens.prefix_digest,
                index=tokens.index,
                logprobs=tuple(_decode_logprobs(logprobs) for logprobs in tokens.logprobs),
            )
        case "finished":
            return _decode_finished(message.finished)
        case _:
            return None


def _decode_logprobs(message: types.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def _decode_finished(message: pb.GenerationFinished) -> Finished:
    return Finished(
        finish_reason=_FINISH_REASONS.get(message.finish_reason, FinishReason.UNKNOWN),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        speculation=_decode_speculation(message.speculation),
        duration=message.duration.ToNanoseconds() / 1e9,
        time_to_first_token=message.time_to_first_token.ToNanoseconds() / 1e9,
        index=message.index,
        stop_text=message.stop_text if message.HasField("stop_text") else None,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
    )


def _decode_speculation(message: pb.SpeculationSummary) -> Speculation:
    return Speculation(
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_accepted_tokens_per_position=tuple(message.num_accepted_tokens_per_position),
        num_plain_steps=message.num_plain_steps,
        mean_acceptance_length=message.mean_acceptance_length,
        acceptance_rate=message.acceptance_rate if message.HasField("acceptance_rate") else None,
        mode=message.mode,
        num_failovers=message.num_failovers,
        num_stale_blocks=message.num_stale_blocks,
        fallbacks=dict(message.fallbacks),
    )


def decode_model(message: pb.ModelInfo) -> Model:
    return Model(message.name, message.context_length, message.vocabulary_size)


def decode_status(message: control.GetStatusResponse) -> Status:
    return Status(
        ready=message.ready,
        version=message.version,
        workers=tuple(_decode_worker(worker) for worker in message.workers),
        active_sequences=message.active_sequences,
        metadata_state=message.metadata_state,
        uptime=message.uptime.ToNanoseconds() / 1e9,
    )


def _decode_worker(message: control.WorkerStatus) -> Worker:
    identity = message.identity
    leased = message.HasField("lease_remaining")
    return Worker(
        worker_id=identity.worker_id,
        role=_word(types.WorkerRole.Name(identity.role), "WORKER_ROLE_"),
        address=message.address,
        state=_word(control.WorkerState.Name(message.state), "WORKER_STATE_"),
        detail=message.detail,
        model=identity.model_name,
        drafter=identity.drafter,
        sequences=message.load.sequences,
        lease_remaining=message.lease_remaining.ToNanoseconds() / 1e9 if leased else None,
    )


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
