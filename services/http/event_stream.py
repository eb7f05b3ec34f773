"""Events as they come, for a page. What fails at once is a status, what fails later is an event."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.errors import SlowReader
from services.http import sse
from services.http.answer import HEADERS, send_bytes
from services.http.disconnect import while_connected
from services.http.errors import error_body, error_response, log_private
from services.http.token_text import Json


class EventStream(Response):
    """Each event is an object with a `type`. Closes `events` as soon as the client has gone."""

    def __init__(self, events: AsyncGenerator[Json, None], names: dict[str, str] | None = None) -> None:
        """names: what a field of the gateway is called here, where it differs."""
        self._events = events
        self._names = names
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await error_response(error, self._names)(scope, receive, send)
                return
            headers = Response(media_type="text/event-stream", headers=HEADERS).raw_headers
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await send_bytes(send, sse.encode(first))
                async for event in events:
                    await send_bytes(send, sse.encode(event))
            except SlowReader:  # nothing reaches it; the connection is closed
                return
            except Exception as error:
                log_private(error)
                await send_bytes(send, sse.encode({"type": "error", **error_body(error, self._names)}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
