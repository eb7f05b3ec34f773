"""The gateway: from what a user asks to a scheduler's request, and from committed tokens back to text.

gRPC and HTTP share it. It holds no model files: the tokenizer comes from a target worker, once per model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.errors import DeadlineExceeded, InvalidRequest, SequenceFailed, Unavailable
from scheduler.request import Event, Finished, GenerationRequest, Started, Tokens
from services.chat import ChatTemplate
from services.generation import (
    ChatPrompt,
    ChoiceFinished,
    ChoiceStarted,
    GatewayEvent,
    TextPrompt,
    TextTokens,
    TokenPrompt,
    UserRequest,
)
from services.tokenizer import IncrementalDetokenizer, InvalidTokenizer, Tokenizer
from services.validation import check_numbers, check_stop_token_ids, sampling_of, trace_context_of
from specdec.commit import commit
from specdec.messages import Identity, TokenizerBundle
from specdec.params import StopConditions

INLINE_CHARACTERS = 4096
"""Longer texts are tokenised in a thread, so that the event loop goes on."""
MAX_CHARACTERS_PER_TOKEN = 256
"""A text with more per token of context cannot fit, and is refused before it is tokenised."""
UNKNOWN_CONTEXT = 2**31 - 1


class Generator(Protocol):
    """The part of `Scheduler` that a gateway needs."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]: ...

    def models(self) -> Sequence[Identity]: ...

    async def tokenizer(self, model: str) -> TokenizerBundle: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """context_length: tokens of prompt and answer together; 0: unknown."""

    name: str
    context_length: int
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """vocabulary_sha256: of the target that the bundle was taken from, to notice that another one serves now."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocabulary_sha256: str

    @property
    def bundle(self) -> TokenizerBundle:
        return self.tokenizer.bundle


class Gateway:
    """Used from one event loop."""

    def __init__(self, scheduler: Generator) -> None:
        self._scheduler = scheduler
        self._loaded: dict[str, _LoadedModel] = {}
        self._loading: dict[str, asyncio.Task[_LoadedModel]] = {}

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(identity.model_name, identity.context_length, identity.vocabulary_size)
            for identity in self._scheduler.models()
        ]

    async def generate(self, request: UserRequest) -> AsyncGenerator[GatewayEvent, None]:
        """Started, TextTokens..., Finished; or raises a RequestError. Closing the iterator cancels the sequence."""
        started = time.monotonic()
        check_numbers(request)
        sampling = sampling_of(request)
        model = await self._model(request.model)
        token_ids = await self._token_ids(request, model)
        check_stop_token_ids(request.stop_token_ids, model.bundle.vocabulary_size)
        traceparent, tracestate = trace_context_of(request.traceparent, request.tracestate)
        stop = self._stop_conditions(request, model, len(token_ids))
        generation = GenerationRequest(
            token_ids=token_ids,
            sampling=sampling,
            model=model.name,
            max_tokens=stop.max_length - stop.prompt_length,
            min_tokens=stop.min_length - stop.prompt_length,
            stop_token_ids=stop.stop_token_ids,
            speculation=request.speculation,
            draft_length=request.draft_length,
            timeout=_left(request.timeout, started),
            request_id=request.request_id,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        text = _TextStream(model.tokenizer.detokenizer(), stop)
        events = self._scheduler.generate(generation)
        try:
            async for event in events:
                if isinstance(event, Tokens):
                    yield text.add(event)
                    continue
                if isinstance(event, Finished) and (rest := text.rest()) is not None:
                    yield rest
                yield _choice_event(event)
                if isinstance(event, Finished):
                    return
        finally:
            await _close(events)
        raise SequenceFailed("the answer ended without its last event")

    async def _model(self, name: str) -> _LoadedModel:
        """Resolves "" to the only model, and takes its tokenizer from a target once. Raises a RequestError."""
        served = {identity.model_name: identity for identity in self._scheduler.models()}
        if not name:
            names = list(served or self._loaded)
            name = names[0] if len(names) == 1 else ""
        loaded = self._loaded.get(name)
        if loaded is not None:
            if not served:  # its targets are away for the moment; the scheduler waits for one
                return loaded
            if name in served and served[name].vocabulary_sha256 == loaded.vocabulary_sha256:
                return loaded
        loading = self._loading.get(name)
        if loading is None:
            sha256 = served[name].vocabulary_sha256 if name in served else ""
            loading = self._loading[name] = asyncio.create_task(self._load(name, sha256))
            loading.add_done_callback(lambda task: self._loaded_or_failed(name, task))
        return await asyncio.shield(loading)  # one who gives up must not take it from the others

    def _loaded_or_failed(self, name: str, task: asyncio.Task[_LoadedModel]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # everyone who waited may have given up; then nobody else looks at it

    async def _load(self, name: str, vocabulary_sha256: str) -> _LoadedModel:
        bundle = await self._scheduler.tokenizer(name)
        try:
            loaded = await asyncio.to_thread(_load_bundle, bundle, vocabulary_sha256)
        except InvalidTokenizer as error:
            raise Unavailable(f"the tokenizer of {bundle.model_name} cannot be read: {error}") from error
        self._loaded[loaded.name] = loaded
        return loaded

    async def _token_ids(self, request: UserRequest, model: _LoadedModel) -> tuple[int, ...]:
        """Raises InvalidRequest for an empty prompt, and for one that leaves no room in the context."""
        prompt, context = request.prompt, self._context_length(model)
        if prompt is None:
            raise InvalidRequest("prompt", "there is no prompt: give text, messages or token ids")
        if isinstance(prompt, TokenPrompt):
            token_ids = prompt.token_ids
            _check_token_ids(token_ids, model.bundle.vocabulary_size)
        else:
            characters = _characters(prompt)
            if context and characters > context * MAX_CHARACTERS_PER_TOKEN:
                raise InvalidRequest(
                    "prompt",
                    f"the prompt has {characters} characters, which cannot fit the context of {model.name}: "
                    f"{context} tokens",
                )
            if isinstance(prompt, ChatPrompt) or characters > INLINE_CHARACTERS:
                token_ids = await asyncio.to_thread(_tokenise, prompt, model)
            else:
                token_ids = _tokenise(prompt, model)
        if not token_ids:
            raise InvalidRequest("prompt", "the prompt is empty: it must have at least one token")
        if context and len(token_ids) >= context:
            raise InvalidRequest(
                "prompt",
                f"the prompt has {len(token_ids)} tokens, the context of {model.name} is {context} tokens: "
                f"at most {context - 1} leave room for an answer",
            )
        return token_ids

    def _stop_conditions(self, request: UserRequest, model: _LoadedModel, prompt_length: int) -> StopConditions:
        """Raises InvalidRequest if more is asked for than the context has room for."""
        context = self._context_length(model) or UNKNOWN_CONTEXT
        left = context - prompt_length
        for field, asked in (("max_tokens", request.max_tokens), ("min_tokens", request.min_tokens)):
            if asked is not None and asked > left:
                raise InvalidRequest(
                    field,
                    f"{field} is {asked}, must be at most {left}: the context of {model.name} is {context} tokens "
                    f"and the prompt has {prompt_length}",
                )
        own = () if request.ignore_eos else model.bundle.stop_token_ids
        return StopConditions(
            prompt_length=prompt_length,
            max_length=prompt_length + (request.max_tokens or left),
            min_length=prompt_length + (request.min_tokens or 0),
            stop_token_ids=frozenset(own) | frozenset(request.stop_token_ids),
        )

    def _context_length(self, model: _LoadedModel) -> int:
        """The smallest that is known: a target may be started with less than its model can."""
        lengths = [model.bundle.context_length]
        lengths += [served.context_length for served in self._scheduler.models() if served.model_name == model.name]
        return min((length for length in lengths if length), default=0)


class _TextStream:
    """Text of one answer. What is held back inside a character belongs to the last token, so the last one is told by
    the same rule by which the target ends a sequence."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: StopConditions) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._flushed = False
        self._end = 0
        self._digest = b""

    def add(self, tokens: Tokens) -> TextTokens:
        pieces = [self._detokenizer.push(token_id) for token_id in tokens.token_ids]
        length = self._stop.prompt_length + tokens.position
        committed = commit(length, tokens.token_ids, self._stop, self._stop.max_length)
        self._end = tokens.position + len(tokens.token_ids)
        self._digest = tokens.prefix_digest
        if committed.finish_reason is not None and pieces:
            pieces[-1] += self._detokenizer.flush()
            self._flushed = True
        return TextTokens(
            index=0,
            position=tokens.position,
            token_ids=tokens.token_ids,
            sources=tokens.sources,
            prefix_digest=tokens.prefix_digest,
            text="".join(pieces),
            pieces=tuple(pieces),
        )

    def rest(self) -> TextTokens | None:
        """Text still held back at an end that was not foreseen, as an event without tokens."""
        text = "" if self._flushed else self._detokenizer.flush()
        return TextTokens(0, self._end, (), (), self._digest, text, ()) if text else None


def _choice_event(event: Started | Finished) -> ChoiceStarted | ChoiceFinished:
    if isinstance(event, Started):
        return ChoiceStarted(0, event.sequence_id, event.model, event.seed, event.prompt_tokens)
    return ChoiceFinished(
        0,
        event.finish_reason,
        event.prompt_tokens,
        event.completion_tokens,
        event.speculation,
        event.duration,
        event.time_to_first_token,
    )


def _load_bundle(bundle: TokenizerBundle, vocabulary_sha256: str) -> _LoadedModel:
    """Takes up to a second for a large vocabulary. Raises InvalidTokenizer."""
    template = None
    if bundle.chat_template is not None:
        try:
            template = ChatTemplate(bundle.chat_template, bundle.special_tokens)
        except ValueError as error:
            raise InvalidTokenizer(str(error)) from error
    return _LoadedModel(bundle.model_name, Tokenizer(bundle), template, vocabulary_sha256)


def _characters(prompt: TextPrompt | ChatPrompt) -> int:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(message.role) + len(message.content) for message in prompt.messages)


def _tokenise(prompt: TextPrompt | ChatPrompt, model: _LoadedModel) -> tuple[int, ...]:
    """Raises InvalidRequest."""
    try:
        if isinstance(prompt, TextPrompt):
            return tuple(model.tokenizer.encode(prompt.text)) if prompt.text else ()
        if not prompt.messages:
            raise InvalidRequest("messages", "there are no messages: give at least one")
        if model.template is None:
            raise InvalidRequest("messages", f"{model.name} has no chat template: give a text prompt instead")
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        return tuple(model.tokenizer.encode(model.template.render(messages), add_special_tokens=False))
    except ValueError as error:
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        raise InvalidRequest(field, f"{field}: {error}") from None


def _check_token_ids(token_ids: tuple[int, ...], vocabulary_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                "prompt", f"token {index} of the prompt is {token_id}, must be in [0, {vocabulary_size})"
            )


def _left(timeout: float | None, started: float) -> float | None:
    """Seconds left of a timeout. Raises DeadlineExceeded."""
    if timeout is None:
        return None
    left = timeout - (time.monotonic() - started)
    if left <= 0:
        raise DeadlineExceeded(f"the deadline of {timeout:g} s passed before the prompt was tokenised")
    return left


async def _close(events: AsyncIterator[Event]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
