"""A request over HTTP as the span above what is done for it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.telemetry.tracing_calls import Calls
from services.telemetry.tracing_span import Attribute

TRACED_PATHS = ("/v1/completions", "/v1/chat/completions")


class TracedCalls:
    """ASGI middleware. A client that goes before the last byte has cancelled."""

    def __init__(self, app: ASGIApp, calls: Calls) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in TRACED_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = _Sent()

        async def send_seen(message: Message) -> None:
            await send(message)
            sent.see(message)

        with self._calls.answering(headers.get("traceparent", ""), headers.get("tracestate", "")) as call:
            try:
                await self._app(scope, receive, send_seen)
            finally:
                name = f"{scope['method']} {scope['path']}"
                attributes = {**sent.attributes(), "outrider.request_id": headers.get("x-request-id", "")}
                attributes |= {"http.request.method": scope["method"], "http.route": scope["path"]}
                self._calls.end(call, name, attributes, sent.error)


class _Sent:
    """What the client was told."""

    def __init__(self) -> None:
        self._status: int | None = None
        self._whole = False

    def see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._whole = True

    @property
    def error(self) -> str:
        return f"HTTP {self._status}" if self._status is not None and self._status >= 500 else ""

    def attributes(self) -> dict[str, Attribute]:
        told: dict[str, Attribute] = {} if self._status is None else {"http.response.status_code": self._status}
        if self.error:
            told["error.type"] = str(self._status)
        return told if self._whole else {**told, "outrider.cancelled": True}
