"""The page `/ui`: one HTML file, a chart library beside it, and what it reads. Nothing comes from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from services.gateway import Gateway
from services.http.event_stream import EventStream
from services.http.reading import read_body
from services.http.ui_answer import Ask, AskBody
from services.http.ui_events import StatusBoard, live
from services.rounds import RoundStore

PAGE = "/ui"
LIBRARY = {"uPlot.iife.min.js": "text/javascript", "uPlot.min.css": "text/css"}
OPEN_PATHS = ("/", PAGE, PAGE + "/", *(f"{PAGE}/{name}" for name in LIBRARY))
"""They carry no key, and tell nothing: what the page shows it reads with the key that it is given."""
INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.DOTALL)
SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
MAX_QUESTION_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class UiRoutes:
    gateway: Gateway
    rounds: RoundStore
    board: StatusBoard
    max_request_bytes: int = MAX_QUESTION_BYTES

    def add_to(self, app: FastAPI) -> None:
        def add(path: str, method: str, endpoint: object) -> None:
            app.add_api_route(path, endpoint, methods=[method], response_model=None, include_in_schema=False)  # type: ignore[arg-type]

        add("/", "GET", self.to_page)
        add(PAGE, "GET", self.page)
        add(PAGE + "/events", "GET", self.events)
        add(PAGE + "/ask", "POST", self.ask)
        add(PAGE + "/{name}", "GET", self.library)

    async def to_page(self) -> Response:
        return RedirectResponse(PAGE)

    async def page(self) -> Response:
        content, policy = page()
        return Response(content, media_type="text/html", headers={**SAFE, "content-security-policy": policy})

    async def library(self, name: str) -> Response:
        if name not in LIBRARY:
            raise HTTPException(404)
        return Response(_file(name), media_type=LIBRARY[name], headers=SAFE)

    async def events(self) -> Response:
        return EventStream(live(self.board, self.rounds))

    async def ask(self, request: Request) -> Response:
        body = await read_body(request, AskBody, self.max_request_bytes)
        return EventStream(Ask(self.gateway, self.rounds, body, request.headers.get("x-request-id", "")).events())


@cache
def page() -> tuple[bytes, str]:
    """The file, and a policy under which its own script and style run, and no other."""
    content = _file("index.html")
    hashes: dict[bytes, list[str]] = {b"style": [], b"script": []}
    for kind, text in INLINE.findall(content):
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'")
    policy = (
        f"default-src 'none'; script-src 'self' {' '.join(hashes[b'script'])}; "
        f"style-src 'self' {' '.join(hashes[b'style'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, policy


def _file(name: str) -> bytes:
    return files("services.http").joinpath("ui", name).read_bytes()
