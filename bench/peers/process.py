"""A peer that is a library: a script of ours drives it, in a process of its own environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contestants import Answer, ContestantFailed, Question
from bench.peers.known import Package

LINE_BYTES = 64 * 2**20


class LibraryPeer:
    """Takes part under `name`. arguments: of the package's script."""

    def __init__(self, name: str, package: Package, arguments: Sequence[str], threads: int, tokenizer: Any) -> None:
        self.name = name
        self.version = ""
        self._package = package
        self._arguments = list(arguments)
        self._environment = package.process_environment(threads)
        self._tokenizer = tokenizer
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises ContestantFailed."""
        script = Path(__file__).parent / self._package.script
        self._process = await asyncio.create_subprocess_exec(
            str(self._package.python),
            str(script),
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
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
        first = questions[0]
        asked = {
            "prompts": [self._ids(question.prompt) for question in questions],
            "tokens": first.tokens,
            "temperature": first.temperature,
            "top_p": first.top_p,
            "seed": first.seed,
        }
        if self._process is None or self._process.stdin is None:
            raise ContestantFailed(f"{self.name} was not started")
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        await self._process.stdin.drain()
        told = await self._line()
        await asyncio.sleep(self._package.restless)
        return told["token_ids"], told["seconds"]

    def _ids(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        ids: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(ids["input_ids"])

    async def _line(self) -> dict[str, Any]:
        stream = self._process.stdout if self._process else None
        line = await stream.readline() if stream else b""
        if not line:
            raise ContestantFailed(f"{self.name} ended: its message is above")
        told: dict[str, Any] = json.loads(line)
        return told
