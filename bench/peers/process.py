"""A peer in a process of its own environment, as a contestant."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.contestants import Answer, Question
from bench.peers.known import PACKAGES, PEERS, Package

LINE_BYTES = 64 * 2**20


class PeerFailed(RuntimeError):
    """The peer's process ended; its own message is on the standard error."""


class Peer:
    """Takes part under `name`. `batch` answers several questions at once."""

    def __init__(self, name: str, package: Package, arguments: Sequence[str], tokenizer: Any) -> None:
        self.name = name
        self.version = ""
        self._package = package
        self._arguments = list(arguments)
        self._tokenizer = tokenizer
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises PeerFailed."""
        script = Path(__file__).parent / self._package.script
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
        self._process = await asyncio.create_subprocess_exec(
            str(self._package.python),
            str(script),
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"PATH": f"{self._package.python.parent}{os.pathsep}{environment.get('PATH', '')}"},
            limit=LINE_BYTES,
        )
        self.version = (await self._line())["ready"]

    async def close(self) -> None:
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(20):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def answer(self, question: Question) -> Answer:
        token_ids, seconds = await self.batch([question])
        return Answer(token_ids[0], seconds)

    async def batch(self, questions: Sequence[Question]) -> tuple[list[list[int]], float]:
        """Token ids of each and seconds for all. The first question says how all are answered. Raises PeerFailed."""
        first = questions[0]
        asked = {
            "prompts": [self._ids(question.prompt) for question in questions],
            "tokens": first.tokens,
            "temperature": first.temperature,
            "top_p": first.top_p,
            "seed": first.seed,
        }
        if self._process is None or self._process.stdin is None:
            raise PeerFailed(f"{self.name} was not started")
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        await self._process.stdin.drain()
        told = await self._line()
        return told["token_ids"], told["seconds"]

    def _ids(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        ids: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(ids["input_ids"])

    async def _line(self) -> dict[str, Any]:
        stream = self._process.stdout if self._process else None
        line = await stream.readline() if stream else b""
        if not line:
            raise PeerFailed(f"{self.name} ended: its message is above")
        told: dict[str, Any] = json.loads(line)
        return told


async def peers(
    names: Sequence[str], target: str, draft: str, threads: int, stack: AsyncExitStack, say: Callable[[str], None]
) -> list[Peer]:
    """Started peers. One that is not installed or does not start is left out, and said so."""
    found: list[Peer] = []
    for name in names:
        package = PACKAGES[PEERS[name]]
        if not package.installed:
            say(f"{name} takes no part: not installed; run `python -m bench.peers install {package.name}`")
            continue
        peer = _peer(name, package, target, draft, threads)
        stack.push_async_callback(peer.close)
        try:
            await peer.start()
        except PeerFailed as error:
            say(f"{name} takes no part: {error}")
            continue
        say(f"{name}: version {peer.version}")
        found.append(peer)
    return found


def _peer(name: str, package: Package, target: str, draft: str, threads: int) -> Peer:
    from transformers import AutoTokenizer

    from bench.peers.gguf import gguf_file
    from services.models import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(target))
    if package.name == "llama_cpp":
        return Peer(name, package, (str(gguf_file()), "-", str(threads)), tokenizer)
    model = str(resolve(draft)) if name.endswith("_draft") else "-"
    return Peer(name, package, (str(resolve(target)), model, str(threads)), tokenizer)
