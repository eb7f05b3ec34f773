"""A batch: each request of a file answered once, so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.batch.input_file import InputFile
from services.batch.output import Output
from services.batch.request import BatchRequest
from services.batch.server import Server, ServerConfig
from services.start_error import ExitCode, StartError


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """concurrency: requests in flight at a time. begin, end: bytes of the input that are meant, as in InputFile."""

    input: Path
    output: Path
    errors: Path
    server: ServerConfig
    concurrency: int = 16
    begin: int = 0
    end: int | None = None


@dataclass(slots=True)
class Tally:
    """Of the whole batch: requests, answered ones, failed ones among those. Of this run: tokens."""

    total: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0


class View(Protocol):
    def show(self, tally: Tally) -> None: ...


@dataclass(slots=True)
class Batch:
    config: BatchConfig
    view: View
    tally: Tally = field(default_factory=Tally)

    async def run(self) -> Tally:
        """Goes on where an earlier run ended. Raises StartError; what was answered until then is kept."""
        source = InputFile(self.config.input, self.config.begin, self.config.end)
        output = Output(self.config.output, self.config.errors)
        self._refuse_same_files()
        wanted = source.check()
        output.open(wanted)
        try:
            self._count(output, len(wanted))
            if output.num_answered < len(wanted):
                left = (request for request in source.requests() if not output.holds(request.custom_id))
                await self._answer(left, output)
        finally:
            output.close()
        return self.tally

    async def _answer(self, requests: Iterable[BatchRequest], output: Output) -> None:
        pending = iter(requests)

        async def work(server: Server) -> None:
            for request in pending:
                answered = await server.ask(request)
                output.write(request, answered)
                self.tally.tokens += answered.tokens
                self._count(output, self.tally.total)

        async with Server(self.config.server) as server:
            await server.check()
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.config.concurrency):
                        group.create_task(work(server))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors

    def _count(self, output: Output, total: int) -> None:
        self.tally.total, self.tally.answered, self.tally.failed = total, output.num_answered, output.num_failed
        self.view.show(self.tally)

    def _refuse_same_files(self) -> None:
        paths = [path.resolve() for path in (self.config.input, self.config.output, self.config.errors)]
        if len(set(paths)) < len(paths):
            raise StartError("input, output and the file of errors must be three files", ExitCode.WRONG_USE)
