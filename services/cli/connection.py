"""The one place where commands talk to a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from outrider.v1 import control_service_pb2 as control
from outrider.v1 import control_service_pb2_grpc as control_grpc
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from services.channel import ChannelConfig, ClientTls, open_channel
from services.cli.answer import Answer, Figures
from services.cli.question import Question
from services.errors import describe, error_info
from services.start_error import ExitCode, StartError
from specdec.commit import TokenSource

DEFAULT_ADDRESS = "127.0.0.1:50051"
STATUS_SECONDS = 5.0

AddressOption = Annotated[str, typer.Option("--address", envvar="OUTRIDER_ADDRESS", help="HOST:PORT of the gateway.")]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="OUTRIDER_API_KEY", help="Key to send, where the gateway wants one.")
]
TlsCaOption = Annotated[
    Path | None, typer.Option("--tls-ca", envvar="OUTRIDER_TLS_CA", help="PEM roots to trust; none: no TLS.")
]

_SOURCES = {
    types_pb2.TOKEN_SOURCE_ACCEPTED: TokenSource.ACCEPTED,
    types_pb2.TOKEN_SOURCE_CORRECTION: TokenSource.CORRECTION,
    types_pb2.TOKEN_SOURCE_BONUS: TokenSource.BONUS,
}
_SPECULATION = {
    "auto": pb.SPECULATION_MODE_AUTO,
    "on": pb.SPECULATION_MODE_ON,
    "off": pb.SPECULATION_MODE_OFF,
}
_WRONG_USE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED)
OnPieces = Callable[[Iterable[tuple[str, TokenSource]]], None]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the gateway is, and what it wants to see."""

    address: str
    api_key: str | None = None
    tls_ca: Path | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else None

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """Turns what goes wrong on it into StartError."""
        try:
            tls = ClientTls(self.tls_ca) if self.tls_ca is not None else None
            channel = open_channel(self.address, ChannelConfig(keepalive_time=10.0, keepalive_timeout=10.0, tls=tls))
        except OSError as error:
            raise StartError(f"cannot read tls_ca {self.tls_ca}: {error.strerror}", ExitCode.WRONG_USE) from error
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            raise self.failure(error) from error
        finally:
            await channel.close(None)

    def failure(self, error: grpc.aio.AioRpcError) -> StartError:
        """One line for the user."""
        if error.code() is grpc.StatusCode.UNAVAILABLE and error_info(error) is None:
            return StartError(f"no server at {self.address}: start one with `outrider up`")
        return StartError(describe(error), ExitCode.WRONG_USE if error.code() in _WRONG_USE else ExitCode.FAILED)


async def ask(connection: Connection, question: Question, on_pieces: OnPieces | None = None) -> Answer:
    """The whole answer; its pieces are told as they come. Raises StartError."""
    async with connection.channel() as channel:
        try:
            return await _stream(channel, connection, question, question.chat is not False, on_pieces)
        except grpc.aio.AioRpcError as error:
            if question.chat is not None or not _has_no_template(error):
                raise
        return await _stream(channel, connection, question, False, on_pieces)


async def fetch_status(connection: Connection, max_sequences: int = 0) -> control.GetStatusResponse:
    """Raises StartError."""
    async with connection.channel() as channel:
        stub = control_grpc.ControlServiceStub(channel)
        return await stub.GetStatus(
            control.GetStatusRequest(max_sequences=max_sequences), timeout=STATUS_SECONDS, metadata=connection.metadata
        )


async def _stream(
    channel: grpc.aio.Channel, connection: Connection, question: Question, chat: bool, on_pieces: OnPieces | None
) -> Answer:
    answer = Answer()
    stub = pb_grpc.GenerationServiceStub(channel)
    call = stub.Generate(_request(question, chat), timeout=question.timeout, metadata=connection.metadata)
    try:
        async for response in call:
            _take(answer, response, on_pieces)
    finally:
        call.cancel()
    if answer.figures is None:
        raise StartError("the stream ended before the answer did")
    return answer


def _take(answer: Answer, response: pb.GenerateResponse, on_pieces: OnPieces | None) -> None:
    match response.WhichOneof("event"):
        case "started":
            answer.model, answer.seed = response.started.model, response.started.seed
        case "tokens":
            tokens = response.tokens
            answer.text += tokens.text
            answer.token_ids += tokens.token_ids
            if on_pieces is not None:
                sources = [_SOURCES.get(source, TokenSource.PLAIN) for source in tokens.sources]
                on_pieces(zip(tokens.pieces, sources, strict=True) if tokens.pieces else [(tokens.text, _LAST)])
        case "finished":
            answer.figures = _figures(response.finished)


_LAST = TokenSource.PLAIN
"""Colour of text that is told without tokens: what was held back at the end."""


def _request(question: Question, chat: bool) -> pb.GenerateRequest:
    fields: dict[str, Any] = {
        name: value
        for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "draft_length")
        if (value := getattr(question, name)) is not None
    }
    if chat:
        fields["chat"] = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=question.prompt)])
    else:
        fields["text"] = question.prompt
    return pb.GenerateRequest(model=question.model, speculation=_SPECULATION[question.speculation], **fields)


def _figures(finished: pb.GenerationFinished) -> Figures:
    speculation = finished.speculation
    return Figures(
        finish_reason=pb_name(types_pb2.FinishReason.Name(finished.finish_reason)),
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        duration=finished.duration.ToNanoseconds() / 1e9,
        time_to_first_token=finished.time_to_first_token.ToNanoseconds() / 1e9,
        mode=speculation.mode,
        acceptance_rate=speculation.acceptance_rate if speculation.HasField("acceptance_rate") else None,
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.num_drafts,
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
        num_plain_steps=speculation.num_plain_steps,
        num_failovers=speculation.num_failovers,
        fallbacks=dict(speculation.fallbacks),
    )


def pb_name(name: str) -> str:
    """ "FINISH_REASON_STOP" -> "stop"."""
    return name.rpartition("_")[2].lower()


def _has_no_template(error: grpc.aio.AioRpcError) -> bool:
    info = error_info(error)
    return info is not None and info.metadata.get("field") == "messages" and "no chat template" in describe(error)
