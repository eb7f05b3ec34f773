"""The HTTP API that a batch asks: what is worth asking again, and for how long."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

from services.batch.output import Answered
from services.batch.request import BatchRequest
from services.start_error import ExitCode, StartError

ATTEMPTS = 3
CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 30.0
_REFUSED_KEY = (401, 403)
_BUSY = 429
_NOT_READY = 503
_FAILED = (500, 502, 504)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """url: with or without /v1. timeout: seconds that one answer may take. patience: seconds without a server, or with
    one that cannot serve, after which the batch gives up. first_pause: seconds before it is asked again, which double.
    """

    url: str
    api_key: str | None = None
    tls_ca: Path | None = None
    timeout: float = 600.0
    patience: float = 60.0
    first_pause: float = 0.25
    connections: int = 16


class Server:
    """Async context manager."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises StartError."""
        self._config = config
        self._url = config.url.rstrip("/").removesuffix("/v1")
        self._down_since: float | None = None
        try:
            self._client = httpx2.AsyncClient(
                base_url=self._url,
                headers={"authorization": f"Bearer {config.api_key}"} if config.api_key else {},
                verify=ssl.create_default_context(cafile=config.tls_ca) if config.tls_ca else True,
                timeout=httpx2.Timeout(config.timeout, connect=CONNECT_SECONDS),
                limits=httpx2.Limits(max_connections=config.connections + 1),
                trust_env=False,
            )
        except OSError as error:
            reason = error.strerror or "it holds no certificate"
            raise StartError(f"cannot read {config.tls_ca}: {reason}", ExitCode.WRONG_USE) from error
        except httpx2.InvalidURL as error:
            raise StartError(f"url is {config.url}: {error}", ExitCode.WRONG_USE) from error

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raises StartError if nobody answers there, or would not answer us."""
        try:
            response = await self._client.get("/v1/models", timeout=CONNECT_SECONDS)
        except httpx2.UnsupportedProtocol:
            text = f"url is {self._config.url}, must begin with http:// or https://"
            raise StartError(text, ExitCode.WRONG_USE) from None
        except httpx2.TransportError as error:
            raise StartError(f"no server at {self._url}: start one with `outrider up` ({_named(error)})") from error
        self._refuse_key(response)

    async def ask(self, request: BatchRequest) -> Answered:
        """Asks until there is an answer that another attempt would not change. Raises StartError."""
        attempt, pause = 0, self._config.first_pause
        while True:
            attempt += 1
            after: float | None = None
            try:
                response = await self._client.post(
                    request.url, content=request.body, headers={"content-type": "application/json"}
                )
            except httpx2.ReadTimeout:
                text = f"there was no answer within {self._config.timeout:g} s, {attempt} times"
                if attempt >= ATTEMPTS:
                    return Answered(error={"code": "request_timeout", "message": text})
            except httpx2.TransportError as error:
                attempt -= 1
                self._wait_for_server(_named(error))
            else:
                self._refuse_key(response)
                if response.status_code == _NOT_READY:
                    attempt -= 1
                    self._wait_for_server(_message(response))
                else:
                    self._down_since = None
                again = response.status_code in (_BUSY, _NOT_READY)
                if not again and (response.status_code not in _FAILED or attempt >= ATTEMPTS):
                    return _answered(response)
                after = _retry_after(response)
            await asyncio.sleep(min(after or pause * random.uniform(0.5, 1.0), LONGEST_PAUSE))
            pause *= 2

    def _wait_for_server(self, reason: str) -> None:
        """Raises StartError if it has been waited for long enough."""
        now = time.monotonic()
        self._down_since = self._down_since or now
        if now - self._down_since >= self._config.patience:
            text = f"no answer from {self._url} for {self._config.patience:g} s ({reason})"
            raise StartError(f"{text}: run the same command again to go on")

    def _refuse_key(self, response: httpx2.Response) -> None:
        if response.status_code in _REFUSED_KEY:
            raise StartError(_message(response), ExitCode.WRONG_USE)


def _answered(response: httpx2.Response) -> Answered:
    body = _body(response)
    if body is None:
        text = f"the server answered {response.status_code} with something else than a JSON object"
        return Answered(error={"code": "invalid_response", "message": text})
    return Answered(response.status_code, response.headers.get("x-request-id", ""), body)


def _body(response: httpx2.Response) -> Mapping[str, Any] | None:
    try:
        body = json.loads(response.content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _message(response: httpx2.Response) -> str:
    """What an OpenAI error says."""
    error = (_body(response) or {}).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or f"the server answered {response.status_code}")


def _retry_after(response: httpx2.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() else None


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__
