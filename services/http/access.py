"""What happens to a request before its route: it gets a name, and its key is looked at."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from services.api_keys import REFUSAL, ApiKeys
from services.errors import Unauthenticated
from services.http import ui_routes
from services.http.errors import error_response

OPEN_PATHS = ("/health", "/ready", *ui_routes.OPEN_PATHS)
"""Probes carry no key, and learn nothing but up or down; neither does the page, which asks its reader for one."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


class Access:
    """ASGI middleware. keys empty: any key is accepted, or none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = ApiKeys(keys) if keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{secrets.token_hex(16)}"
            others = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            scope["headers"] = [*others, (b"x-request-id", request_id.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with bound_contextvars(request_id=request_id):  # in every log line that this request causes
            if self._allows(scope["path"], headers.get("authorization", "")):
                await self._app(scope, receive, send_named)
            else:
                await error_response(Unauthenticated(REFUSAL))(scope, receive, send_named)

    def _allows(self, path: str, authorization: str) -> bool:
        return self._keys is None or path in OPEN_PATHS or self._keys.allow(authorization)
