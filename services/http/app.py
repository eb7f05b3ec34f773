"""The routes. Each converts, calls the gateway, converts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from outrider.version import __version__
from scheduler.errors import ModelNotFound, RequestError
from scheduler.links import LinkError
from services.codec import InvalidMessage
from services.gateway import Gateway, ServedModel
from services.http.access import Access
from services.http.answer import CHAT, COMPLETION, Answer, Form, Streaming
from services.http.asking import Asked, ask_chat, ask_completion
from services.http.bodies import GenerationBody
from services.http.chat_body import ChatBody
from services.http.chat_choice import ChatChoice
from services.http.choice import MakeChoice
from services.http.completion_body import CompletionBody
from services.http.completion_choice import CompletionChoice
from services.http.errors import HttpError, bad_request, error_response, on_error, on_http_exception
from services.http.reading import Body, read_body
from services.http.texts import DetokenizeBody, TokenizeBody, detokenize, tokenize
from services.http.token_text import Json, TokenText
from services.http.tracing import TracedCalls
from services.http.ui_routes import UiRoutes
from services.telemetry.tracing_calls import Calls
from services.tools import marks_are_tokens, writes_tool_calls

DEFAULT_MAX_REQUEST_BYTES = 32 * 2**20

RenderMetrics = Callable[[str], tuple[bytes, str]]
"""From what is accepted (the header) to text in one of Prometheus' formats, and its content type."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """api_keys empty: any key is accepted. cors_origins: web pages of these origins may call; empty: none."""

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES


def make_app(
    gateway: Gateway,
    config: HttpConfig | None = None,
    *,
    ready: Callable[[], bool] = lambda: True,
    render_metrics: RenderMetrics | None = None,
    ui: UiRoutes | None = None,
    calls: Calls | None = None,
) -> FastAPI:
    """ready: whether a request could be answered now. render_metrics: what `/metrics` shows. calls: traces them."""
    config = config or HttpConfig()
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)
    if calls is not None:
        app.add_middleware(TracedCalls, calls=calls)
    app.add_middleware(Access, keys=config.api_keys)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    for kind in (HttpError, RequestError, InvalidMessage, LinkError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    Routes(gateway, config, ready, render_metrics).add_to(app)
    if ui is not None:
        ui.add_to(app)
    return app


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """It went while it sent its body: nobody reads this."""
    return Response(status_code=400)


class Routes:
    def __init__(
        self, gateway: Gateway, config: HttpConfig, ready: Callable[[], bool], render_metrics: RenderMetrics | None
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._ready = ready
        self._render_metrics = render_metrics

    def add_to(self, app: FastAPI) -> None:
        def add(path: str, method: str, endpoint: Callable[..., Any], body: type[BaseModel] | None = None) -> None:
            extra = {} if body is None else {"requestBody": _documented(body)}
            app.add_api_route(path, endpoint, methods=[method], response_model=None, openapi_extra=extra)

        add("/v1/completions", "POST", self.completions, CompletionBody)
        add("/v1/chat/completions", "POST", self.chat_completions, ChatBody)
        add("/v1/models", "GET", self.models)
        add("/v1/models/{model:path}", "GET", self.one_model)
        add("/tokenize", "POST", self.tokenize, TokenizeBody)
        add("/detokenize", "POST", self.detokenize, DetokenizeBody)
        add("/health", "GET", self.health)
        add("/ready", "GET", self.ready)
        add("/version", "GET", self.version)
        if self._render_metrics is not None:
            add("/metrics", "GET", self.metrics)

    async def completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionBody)
        asked = ask_completion(body, request.headers)
        tokens = None if body.logprobs is None else TokenText((await self._gateway.model(body.model or "")).tokenizer)
        return self._answer(body, asked, COMPLETION, lambda index: CompletionChoice(index, tokens))

    async def chat_completions(self, request: Request) -> Response:
        body = await self._read(request, ChatBody)
        asked = ask_chat(body, request.headers)
        tokens: TokenText | None = None
        if body.logprobs or body.forced_tools:
            model = await self._gateway.model(body.model or "")
            if body.forced_tools:
                if not writes_tool_calls(model.bundle.chat_template):
                    raise bad_request("tool_choice", f"tool_choice: {model.name} knows no form in which to call a tool")
                asked = ask_chat(body, request.headers, marks_are_tokens(model.tokenizer))
            tokens = TokenText(model.tokenizer) if body.logprobs else None
        has_tools = bool(body.tools_in_use)
        return self._answer(body, asked, CHAT, lambda index: ChatChoice(index, tokens, has_tools))

    async def models(self) -> Json:
        return {"object": "list", "data": [_model(served) for served in self._gateway.models()]}

    async def one_model(self, model: str) -> Json:
        served = self._gateway.models()
        for one in served:
            if one.name == model:
                return _model(one)
        raise ModelNotFound(f"model {model} is not served; served: {', '.join(sorted(one.name for one in served))}")

    async def tokenize(self, request: Request) -> Json:
        body = await self._read(request, TokenizeBody)
        model = await self._gateway.model(body.model or "")
        return await tokenize(body, model, self._context_length(model.name) or model.bundle.context_length)

    async def detokenize(self, request: Request) -> Json:
        body = await self._read(request, DetokenizeBody)
        return await detokenize(body, await self._gateway.model(body.model or ""))

    async def health(self) -> Json:
        """The process answers."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """A request could be answered: there is a live target, and the process does not drain."""
        if self._ready():
            return JSONResponse({"status": "ready"})
        return error_response(HttpError(503, "no live target worker, or the scheduler drains", code="not_ready"))

    async def version(self) -> Json:
        return {"version": __version__}

    async def metrics(self, request: Request) -> Response:
        if self._render_metrics is None:
            raise HTTPException(404)
        text, content_type = self._render_metrics(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        return await read_body(request, kind, self._config.max_request_bytes)

    def _answer(self, body: GenerationBody, asked: Asked, form: Form, make_choice: MakeChoice) -> Answer:
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options", "stream_options need stream: true")
        streaming = Streaming(body.usage_in_stream, body.obfuscated) if body.stream else None
        return Answer(self._gateway, asked, form, make_choice, self._fingerprint(body.model or ""), streaming)

    def _fingerprint(self, model: str) -> str:
        """Of what the text depends on beside the request: program and models."""
        served = [one for one in self._gateway.models() if not model or one.name == model]
        return "fp_" + hashlib.blake2b(repr((__version__, served)).encode(), digest_size=5).hexdigest()

    def _context_length(self, model: str) -> int:
        return next((one.context_length for one in self._gateway.models() if one.name == model), 0)


def _model(served: ServedModel) -> Json:
    """created: unknown, which clients want as a number."""
    length = served.context_length
    return {"id": served.name, "object": "model", "created": 0, "owned_by": "outrider", "max_model_len": length}


def _documented(body: type[BaseModel]) -> Json:
    return {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}
