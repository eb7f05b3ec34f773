"""The HTTP API behind a real socket, over any scheduler, and the official client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from services import grammar_check
from services.gateway import Gateway, Generator
from services.http.app import HttpConfig, RenderMetrics, make_app
from services.http.server import HttpServer
from services.telemetry.tracing_calls import Calls


@asynccontextmanager
async def served_http(
    scheduler: Generator,
    config: HttpConfig | None = None,
    ready: Callable[[], bool] = lambda: True,
    render_metrics: RenderMetrics | None = None,
    calls: Calls | None = None,
) -> AsyncIterator[str]:
    """Yields the URL, without /v1."""
    gateway = Gateway(scheduler, check_grammar=grammar_check.check)
    app = make_app(gateway, config, ready=ready, render_metrics=render_metrics, calls=calls)
    server = HttpServer(app, "127.0.0.1", 0)
    try:
        yield await server.start()
    finally:
        await server.close(1)


@asynccontextmanager
async def openai_client(url: str, api_key: str = "any", max_retries: int = 0) -> AsyncIterator[AsyncOpenAI]:
    """Past every proxy that the environment names."""
    async with DefaultAsyncHttpxClient(timeout=30, trust_env=False) as connections:
        yield AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, http_client=connections, max_retries=max_retries)


@asynccontextmanager
async def served_openai(scheduler: Generator, config: HttpConfig | None = None) -> AsyncIterator[AsyncOpenAI]:
    async with served_http(scheduler, config) as url, openai_client(url) as client:
        yield client


@asynccontextmanager
async def served_raw(
    scheduler: Generator,
    config: HttpConfig | None = None,
    ready: Callable[[], bool] = lambda: True,
    render_metrics: RenderMetrics | None = None,
) -> AsyncIterator[httpx2.AsyncClient]:
    """Bytes as they are, for what the official client would not send or hides."""
    async with (
        served_http(scheduler, config, ready, render_metrics) as url,
        httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client
