"""The one place where commands talk to a gateway: through the SDK, with every error as one line."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from outrider.client import AsyncClient
from outrider.errors import (
    AuthenticationFailed,
    InvalidRequest,
    ModelNotFound,
    OutriderError,
    ServerUnreachable,
)
from outrider.events import Event, Finished, Started, Tokens, TokenSource
from outrider.request import GenerateOptions
from services.cli.answer import Answer, Figures
from services.cli.question import Question
from services.start_error import ExitCode, StartError

DEFAULT_ADDRESS = "127.0.0.1:50051"

AddressOption = Annotated[str, typer.Option("--address", envvar="OUTRIDER_ADDRESS", help="HOST:PORT of the gateway.")]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="OUTRIDER_API_KEY", help="Key to send, where the gateway wants one.")
]
TlsCaOption = Annotated[
    Path | None, typer.Option("--tls-ca", envvar="OUTRIDER_TLS_CA", help="PEM roots to trust; none: no TLS.")
]

_WRONG_USE = (InvalidRequest, ModelNotFound, AuthenticationFailed)
OnPieces = Callable[[Iterable[tuple[str, TokenSource]]], None]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the gateway is, and what it wants to see."""

    address: str
    api_key: str | None = None
    tls_ca: Path | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """Turns what the SDK raises into StartError."""
        try:
            async with AsyncClient(self.address, api_key=self.api_key, tls_ca=self.tls_ca) as client:
                yield client
        except OutriderError as error:
            raise self.failure(error) from error

    def failure(self, error: OutriderError) -> StartError:
        """One line for the user."""
        message = str(error)
        if isinstance(error, ServerUnreachable) and message.startswith("no server at"):
            return StartError(f"no server at {self.address}: start one with `outrider up`")
        return StartError(message, ExitCode.WRONG_USE if isinstance(error, _WRONG_USE) else ExitCode.FAILED)


async def ask(connection: Connection, question: Question, on_pieces: OnPieces | None = None) -> Answer:
    """The whole answer, of one choice; its pieces are told as they come. Raises StartError."""
    return (await ask_all(connection, question, on_pieces))[0]


async def ask_all(connection: Connection, question: Question, on_pieces: OnPieces | None = None) -> list[Answer]:
    """All choices, by index; pieces are told as they come. Raises StartError."""
    async with connection.client() as client:
        try:
            return await _stream(client, question, question.chat is not False, on_pieces)
        except InvalidRequest as error:
            if question.chat is not None or error.field != "messages" or "no chat template" not in str(error):
                raise
        return await _stream(client, question, False, on_pieces)


async def _stream(client: AsyncClient, question: Question, chat: bool, on_pieces: OnPieces | None) -> list[Answer]:
    answers: dict[int, Answer] = {}
    prompt, options = _options(question, chat)
    async with aclosing(client.generate(prompt, **options)) as events:
        async for event in events:
            answer = answers.setdefault(event.index, Answer(event.index))
            _add(answer, event)
            if on_pieces is not None and isinstance(event, Tokens):
                on_pieces(_pieces(event))
    return [answers[index] for index in sorted(answers)]


def _add(answer: Answer, event: Event) -> None:
    match event:
        case Started():
            answer.model, answer.seed, answer.sequence_id = event.model, event.seed, event.sequence_id
        case Tokens():
            answer.pieces += _pieces(event)
            answer.token_ids += event.token_ids
            answer.token_texts += event.pieces
            answer.logprobs += event.logprobs
        case Finished():
            answer.figures, answer.stop_text = _figures(event), event.stop_text


def _pieces(tokens: Tokens) -> Iterable[tuple[str, TokenSource]]:
    """Text that comes without tokens is the echoed prompt, or was held back to the end."""
    if not tokens.pieces:
        return [(tokens.text, TokenSource.UNKNOWN)]
    return zip(tokens.pieces, tokens.sources, strict=True)


def _options(question: Question, chat: bool) -> tuple[str | None, GenerateOptions]:
    names = question.__dataclass_fields__.keys() & GenerateOptions.__annotations__.keys()
    options = cast(GenerateOptions, {name: getattr(question, name) for name in names})
    options["choice"] = question.choice or None
    options["traceparent"] = os.environ.get("TRACEPARENT", "")
    options["tracestate"] = os.environ.get("TRACESTATE", "")
    if chat:
        options["messages"] = [{"role": "user", "content": question.prompt}]
        return None, options
    return question.prompt, options


def _figures(finished: Finished) -> Figures:
    speculation = finished.speculation
    return Figures(
        finish_reason=finished.finish_reason.value,
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        duration=finished.duration,
        time_to_first_token=finished.time_to_first_token,
        mode=speculation.mode,
        acceptance_rate=speculation.acceptance_rate,
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.num_drafts,
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
        num_plain_steps=speculation.num_plain_steps,
        num_failovers=speculation.num_failovers,
        fallbacks=dict(speculation.fallbacks),
    )
