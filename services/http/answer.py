"""An answer on its way to the client: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.choices import side_by_side
from services.errors import SlowReader
from services.gateway import Gateway
from services.generation import ChoiceFinished, ChoiceStarted, GatewayEvent, TextTokens
from services.http import sse
from services.http.asking import Asked
from services.http.choice import Choice, MakeChoice
from services.http.disconnect import while_connected
from services.http.errors import error_body, error_response, log_private
from services.http.token_text import Json
from services.http.usage import metrics, usage

READ_SECONDS = 60.0
"""A client that does not read what it asked for is given up after this."""
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Form:
    """What the two APIs call things."""

    kind: str
    chunk_kind: str
    id_prefix: str


CHAT = Form("chat.completion", "chat.completion.chunk", "chatcmpl-")
COMPLETION = Form("text_completion", "text_completion", "cmpl-")


@dataclass(frozen=True, slots=True)
class Streaming:
    usage: bool
    obfuscation: bool


class Answer(Response):
    """Asks the gateway when it is sent, so that the generation lives exactly as long as the client listens.

    streaming None: one JSON object in the end.
    """

    def __init__(
        self,
        gateway: Gateway,
        asked: Asked,
        form: Form,
        make_choice: MakeChoice,
        fingerprint: str,
        streaming: Streaming | None,
    ) -> None:
        self._gateway = gateway
        self._asked = asked
        self._form = form
        self._fingerprint = fingerprint
        self._streaming = streaming
        self._choices = [make_choice(i) for i in range(len(asked.requests) * asked.choices_per_prompt)]
        self._id = form.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())
        self._model = ""
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events()) as events:
            try:
                first = await anext(events)
                if self._streaming is None:
                    self._take(first)
                    async for event in events:
                        self._take(event)
            except Exception as error:
                await error_response(error, self._asked.names)(scope, receive, send)
                return
            if self._streaming is None:
                await JSONResponse(self._whole())(scope, receive, send)
            else:
                await self._stream(self._take(first), events, self._streaming, send)

    async def _events(self) -> AsyncGenerator[GatewayEvent, None]:
        """Of all prompts; choices of prompt i have the indices from i * n on."""
        streams = [self._gateway.generate(request) for request in self._asked.requests]
        if len(streams) == 1:
            merged = streams[0]
        else:
            shifted = [_shifted(stream, i * self._asked.choices_per_prompt) for i, stream in enumerate(streams)]
            merged = side_by_side(shifted)
        async with aclosing(merged) as events:
            async for event in events:
                yield event

    def _take(self, event: GatewayEvent) -> list[Json]:
        """The chunks that tell of this event."""
        choice = self._choices[event.index]
        if isinstance(event, ChoiceStarted):
            self._model = event.model
            parts = choice.start(event)
        elif isinstance(event, TextTokens):
            parts = choice.add(event)
        else:
            parts = choice.finish(event)
        return [{**self._envelope(self._form.chunk_kind), "choices": [part]} for part in parts]

    async def _stream(
        self, first: list[Json], events: AsyncIterator[GatewayEvent], streaming: Streaming, send: Send
    ) -> None:
        headers = Response(media_type="text/event-stream", headers=HEADERS).raw_headers
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._write(first, streaming, send)
            async for event in events:
                await self._write(self._take(event), streaming, send)
            end = sse.encode(self._last_chunk()) if streaming.usage else b""
            await send_bytes(send, end + sse.DONE)
        except SlowReader:  # nothing reaches it; the connection is closed
            return
        except Exception as error:  # the status is long told; the stream says it in its own way
            log_private(error)
            await send_bytes(send, sse.encode(error_body(error, self._asked.names)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, chunks: list[Json], streaming: Streaming, send: Send) -> None:
        for chunk in chunks:
            if self._finished and not streaming.usage and chunk is chunks[-1]:
                chunk["metrics"] = metrics(self._finished)
            if streaming.usage:
                chunk["usage"] = None
            await send_bytes(send, sse.encode(sse.obfuscated(chunk) if streaming.obfuscation else chunk))

    @property
    def _finished(self) -> list[ChoiceFinished]:
        """Of all choices by index, once all have finished; until then none."""
        finished = [choice.finished for choice in self._choices if choice.finished is not None]
        return finished if len(finished) == len(self._choices) else []

    def _whole(self) -> Json:
        choices = [choice.whole() for choice in self._choices]
        return {**self._envelope(self._form.kind), "choices": choices, **self._figures(), **_seed(self._choices)}

    def _last_chunk(self) -> Json:
        return {**self._envelope(self._form.chunk_kind), "choices": [], **self._figures(), **_seed(self._choices)}

    def _figures(self) -> Json:
        return {
            "usage": usage(self._finished, self._asked.choices_per_prompt),
            "metrics": metrics(self._finished),
        }

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }


def _seed(choices: list[Choice]) -> Json:
    """The request's: that of the first choice."""
    return {"seed": choices[0].seed}


async def _shifted(stream: AsyncGenerator[GatewayEvent, None], by: int) -> AsyncGenerator[GatewayEvent, None]:
    async with aclosing(stream):
        async for event in stream:
            yield replace(event, index=event.index + by)


async def send_bytes(send: Send, content: bytes) -> None:
    """Waits while the client is slow, but not for ever. Raises SlowReader."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            await send({"type": "http.response.body", "body": content, "more_body": True})
    except TimeoutError:
        raise SlowReader(f"the client has read nothing for {READ_SECONDS:g} s") from None
