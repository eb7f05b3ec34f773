"""The gateway: from what a user asks to a scheduler's request, and from committed tokens back to text.

gRPC and HTTP share it. It holds no model files: the tokenizer comes from a target worker, once per model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from scheduler.errors import DeadlineExceeded, InvalidRequest, SequenceFailed, Unavailable
from scheduler.request import Event, Finished, GenerationRequest, Started, Tokens
from services.answer_text import AnswerText
from services.bad_words import bad_word_ids
from services.choices import side_by_side
from services.generation import ChatPrompt, ChoiceFinished, ChoiceStarted, GatewayEvent, TextTokens, UserRequest
from services.loaded_model import LoadedModel
from services.prompts import echoed_text, prompt_token_ids
from services.telemetry.tracing_context import current_call
from services.text_stops import TextStops
from services.tokenizer import InvalidTokenizer
from services.tools import parse_tool_calls
from services.validation import check_request, check_something_left, check_token_ids, sampling_of, trace_context_of
from specdec.commit import FinishReason
from specdec.grammar import InvalidGrammar
from specdec.messages import Identity, TokenizerBundle
from specdec.params import AcceptRule, Grammar, LogprobsOf, Report, StopConditions
from specdec.seeds import choice_seed

log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 2**31 - 1

GrammarCheck = Callable[[Grammar], None]
"""Raises InvalidGrammar. Called in a thread: compiling may take long."""


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
class _Prepared:
    """What the choices of one request have in common. echo: the text that each begins with."""

    generation: GenerationRequest
    model: LoadedModel
    stop: StopConditions
    echo: str


class Gateway:
    """Used from one event loop. accept_rule: of requests that name none. check_grammar None: the workers judge it.
    log_prompts: what users send and get is logged."""

    def __init__(
        self,
        scheduler: Generator,
        accept_rule: AcceptRule = AcceptRule.INVARIANT,
        check_grammar: GrammarCheck | None = None,
        log_prompts: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._accept_rule = accept_rule
        self._check_grammar = check_grammar
        self._log_prompts = log_prompts
        self._loaded: dict[str, LoadedModel] = {}
        self._loading: dict[str, asyncio.Task[LoadedModel]] = {}

    def models(self) -> list[ServedModel]:
        return [
            ServedModel(identity.model_name, identity.context_length, identity.vocabulary_size)
            for identity in self._scheduler.models()
        ]

    def generate(self, request: UserRequest) -> AsyncGenerator[GatewayEvent, None]:
        """Of each choice ChoiceStarted, TextTokens..., ChoiceFinished; or raises one RequestError, which ends them all.
        Closing the iterator cancels them."""
        return self._choice(request, 0) if request.n in (None, 1) else self._choices(request)

    async def _choices(self, request: UserRequest) -> AsyncGenerator[GatewayEvent, None]:
        prepared = await self._prepare(request)
        choices = [self._choice(request, index, prepared) for index in range(request.n or 1)]
        async with aclosing(side_by_side(choices)) as events:
            async for event in events:
                yield event

    async def _prepare(self, request: UserRequest) -> _Prepared:
        """Raises a RequestError."""
        started = time.monotonic()
        accept_rule = request.accept_rule or self._accept_rule
        check_request(request, accept_rule)
        sampling = sampling_of(request, accept_rule)
        model = await self.model(request.model)
        vocabulary_size = model.bundle.vocabulary_size
        check_token_ids(request, vocabulary_size)
        token_ids = await prompt_token_ids(request.prompt, model, self._context_length(model))
        stop = self._stop_conditions(request, model, len(token_ids))
        bad_words = dict.fromkeys((*bad_word_ids(request.bad_words, model.tokenizer), *request.bad_word_ids))
        sampling = replace(sampling, bad_words=tuple(bad_words))
        check_something_left(sampling, stop, vocabulary_size)
        await self._judge_grammar(request.grammar)
        traceparent, tracestate = trace_context_of(request.traceparent, request.tracestate)
        call = current_call.get()
        if call is not None:
            traceparent = call.context.traceparent
        generation = GenerationRequest(
            token_ids=token_ids,
            sampling=sampling,
            model=model.name,
            max_tokens=stop.max_length - stop.prompt_length,
            min_tokens=stop.min_length - stop.prompt_length,
            stop_token_ids=stop.stop_token_ids,
            report=Report(request.top_logprobs, request.logprobs_of or LogprobsOf.RAW),
            speculation=request.speculation,
            draft_length=request.draft_length,
            timeout=_left(request.timeout, started),
            request_id=request.request_id,
            traceparent=traceparent,
            tracestate=tracestate,
            traced=call is not None,
        )
        if self._log_prompts:
            prompt = model.tokenizer.decode(token_ids)
            log.info("a request of %d tokens", len(token_ids), extra={"prompt": prompt, "traceparent": traceparent})
        echo = echoed_text(request.prompt, model) if request.echo else ""
        return _Prepared(generation, model, stop, echo)

    async def _choice(
        self, request: UserRequest, index: int, prepared: _Prepared | None = None
    ) -> AsyncGenerator[GatewayEvent, None]:
        """prepared None: it is the only one, and prepares the request itself."""
        prepared = prepared or await self._prepare(request)
        generation = prepared.generation
        stops = TextStops(request.stop, request.include_stop_str_in_output)
        text = AnswerText(index, prepared.model.tokenizer.detokenizer(), prepared.stop, stops)
        sampling = replace(generation.sampling, seed=choice_seed(generation.sampling.seed, index))
        watcher = text if request.stop else None
        events = self._scheduler.generate(replace(generation, sampling=sampling, watcher=watcher))
        try:
            async for event in events:
                if isinstance(event, Tokens):
                    yield text.add(event)
                elif isinstance(event, Started):
                    yield ChoiceStarted(index, event.sequence_id, event.model, event.seed, event.prompt_tokens)
                    if prepared.echo:
                        yield TextTokens(index, 0, (), (), b"", prepared.echo, ())
                else:
                    if (rest := text.rest()) is not None:
                        yield rest
                    if self._log_prompts:
                        extra = {"answer": text.told, "traceparent": generation.traceparent}
                        log.info("an answer of %d tokens", event.completion_tokens, extra=extra)
                    yield _finished(index, event, text, request)
                    return
        finally:
            await _close(events)
        raise SequenceFailed("the answer ended without its last event")

    async def _judge_grammar(self, grammar: Grammar | None) -> None:
        if grammar is None or self._check_grammar is None:
            return
        try:
            await asyncio.to_thread(self._check_grammar, grammar)
        except InvalidGrammar as error:
            raise InvalidRequest("grammar", f"grammar: {error}") from None

    async def model(self, name: str) -> LoadedModel:
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

    def _loaded_or_failed(self, name: str, task: asyncio.Task[LoadedModel]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # everyone who waited may have given up; then nobody else looks at it

    async def _load(self, name: str, vocabulary_sha256: str) -> LoadedModel:
        bundle = await self._scheduler.tokenizer(name)
        try:
            loaded = await asyncio.to_thread(LoadedModel.load, bundle, vocabulary_sha256)
        except InvalidTokenizer as error:
            raise Unavailable(f"the tokenizer of {bundle.model_name} cannot be read: {error}") from error
        self._loaded[loaded.name] = loaded
        return loaded

    def _stop_conditions(self, request: UserRequest, model: LoadedModel, prompt_length: int) -> StopConditions:
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

    def _context_length(self, model: LoadedModel) -> int:
        """The smallest that is known: a target may be started with less than its model can."""
        lengths = [model.bundle.context_length]
        lengths += [served.context_length for served in self._scheduler.models() if served.model_name == model.name]
        return min((length for length in lengths if length), default=0)


def _finished(index: int, event: Finished, text: AnswerText, request: UserRequest) -> ChoiceFinished:
    has_tools = isinstance(request.prompt, ChatPrompt) and bool(request.prompt.tools)
    return ChoiceFinished(
        index=index,
        finish_reason=event.finish_reason if text.stop_text is None else FinishReason.STOP,
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        speculation=event.speculation,
        duration=event.duration,
        time_to_first_token=event.time_to_first_token,
        stop_text=text.stop_text,
        tool_calls=parse_tool_calls(text.told)[1] if has_tools else (),
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
