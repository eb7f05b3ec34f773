"""vLLM as its users run it: its own OpenAI server in a process of its own, asked over HTTP for streamed answers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from bench.contestants import Answer, ContestantFailed, Question, at_once
from services.child import Child, ChildSpec
from services.supervisor import Guard

START_SECONDS = 300.0
STOP_SECONDS = 20.0
TOLD_EVERY = 5.0
"""Seconds between two words about a server that starts."""
SERVED_AS = "model"
_DATA = "data: "
_LAST = "[DONE]"


class ServerPeer:
    """Takes part under `name`. command: all of the server's but its port; environment: all of it. restless:
    seconds for which it still takes a core when it has answered."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        say: Callable[[str], None],
        restless: float = 0.0,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = name
        self.version = ""
        self._command = tuple(command)
        self._environment = environment
        self._say = say
        self._restless = restless
        self._start_seconds = start_seconds
        self._child: Child | None = None
        self._ended = threading.Event()
        self._guard: Guard | None = None
        self._client = httpx2.AsyncClient(verify=False, trust_env=False)

    async def start(self) -> None:
        """Until it says that it is healthy. Raises ContestantFailed with the server's own last lines."""
        port = _free_port()
        command = (*self._command, "--port", str(port))
        limits = httpx2.Limits(max_connections=None)
        self._client = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits, verify=False, trust_env=False
        )
        self._child = Child(
            ChildSpec(self.name, command, self._environment),
            lambda name, line: None,
            lambda child, code: self._ended.set(),
        )
        self._guard = Guard(Path(tempfile.mkdtemp(prefix="outrider-peer-")))  # for when we are killed
        self._guard.add(self._child.pid)
        started = told = time.monotonic()
        while not await self._healthy():
            now = time.monotonic()
            if self._ended.is_set():
                raise ContestantFailed(f"{self.name} ended while it started{self._last_lines()}")
            if now - started > self._start_seconds:
                raise ContestantFailed(
                    f"{self.name} did not start within {self._start_seconds:g} s{self._last_lines()}"
                )
            if now - told >= TOLD_EVERY:
                told = now
                self._say(f"{self.name} starts, {now - started:.0f} s")
            await asyncio.sleep(0.25)
        self.version = (await self._client.get("/version")).json()["version"]

    async def close(self) -> None:
        """Ends its whole process group."""
        await self._client.aclose()
        if self._child is None or self._guard is None:
            return
        self._child.signal(signal.SIGTERM)
        await asyncio.to_thread(self._ended.wait, STOP_SECONDS)
        await asyncio.to_thread(self._guard.close)  # kills what is left of the group
        await asyncio.to_thread(self._ended.wait)

    async def answer(self, question: Question) -> Answer:
        answer = await self._streamed(question)
        await asyncio.sleep(self._restless)
        return answer

    async def batch(self, questions: Sequence[Question]) -> tuple[list[list[int]], float]:
        answers = await at_once(self._streamed, questions)
        await asyncio.sleep(self._restless)
        return answers

    async def _streamed(self, question: Question) -> Answer:
        token_ids: list[int] = []
        first_seconds = 0.0
        started = time.perf_counter()
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=_request(question)) as response:
                if response.status_code != httpx2.codes.OK:
                    raise ContestantFailed(f"{self.name} refused a request: {(await response.aread()).decode()}")
                async for line in response.aiter_lines():
                    if not line.startswith(_DATA) or line.endswith(_LAST):
                        continue
                    token_ids += self._token_ids(json.loads(line.removeprefix(_DATA)))
                    if token_ids and not first_seconds:
                        first_seconds = time.perf_counter() - started
        except httpx2.HTTPError as error:
            raise ContestantFailed(f"{self.name}: {type(error).__name__}{self._last_lines()}") from error
        return Answer(token_ids, time.perf_counter() - started, first_seconds)

    async def _healthy(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=5)).is_success
        except httpx2.TransportError:
            return False

    def _token_ids(self, event: Mapping[str, Any]) -> list[int]:
        """An error in the middle of an answer is an event too."""
        if "error" in event:
            raise ContestantFailed(f"{self.name} failed in an answer: {event['error']}")
        return [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or ()]

    def _last_lines(self) -> str:
        lines = self._child.last_lines if self._child else ()
        return "".join(f"\n  {line}" for line in lines) or "; it wrote nothing"


def _request(question: Question) -> dict[str, Any]:
    """return_token_ids: as our own stream tells them beside the text."""
    return {
        "model": SERVED_AS,
        "messages": [{"role": "user", "content": question.prompt}],
        "max_tokens": question.tokens,
        "min_tokens": question.tokens,
        "ignore_eos": True,
        "temperature": question.temperature,
        "top_p": question.top_p,
        "seed": question.seed,
        "stream": True,
        "return_token_ids": True,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
