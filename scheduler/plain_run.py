"""One answer decoded plainly on a given target, apart from all sequences: no drafter, no record, no counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from scheduler.worker import AnyResult, Worker
from specdec.log import Log
from specdec.messages import Committed, Epoch, Grant, Header, Opened, Prefilled, Release, TargetItem, TargetOpen
from specdec.params import Report, SamplingParams, StopConditions


class Interrupted(Exception):
    """The run was given up in favour of other work."""


class RunFailed(Exception):
    """The target did not decode it; the message says why."""


class PlainRun:
    """`committed` may be iterated once; closing it releases the sequence on the target."""

    def __init__(
        self,
        sequence_id: str,
        owner: str,
        target: Worker,
        log: Log,
        sampling: SamplingParams,
        stop: StopConditions,
        report: Report,
    ) -> None:
        self.sequence_id = sequence_id
        self.target = target
        self._epoch = Epoch(1, owner)
        self._log = log
        self._open = TargetOpen(tuple(log.token_ids), sampling, stop, Grant(stop.max_length), log.root, report)
        self._inbox: asyncio.Queue[AnyResult | Interrupted] = asyncio.Queue()

    def deliver(self, result: AnyResult) -> None:
        self._inbox.put_nowait(result)

    def interrupt(self) -> None:
        self._inbox.put_nowait(Interrupted())

    async def committed(self, timeout: float) -> AsyncGenerator[Committed, None]:
        """What the target commits, to the end. Raises Interrupted, and RunFailed, also after
        `timeout` seconds without progress."""
        self.target.send(TargetItem(self._header(), self._open))
        try:
            while True:
                body = await self._next(timeout)
                if body is None:
                    continue
                self._log.append(body.token_ids)
                yield body
                if body.finish_reason is not None:
                    return
        finally:
            self.target.send(TargetItem(self._header(), Release()))

    async def _next(self, timeout: float) -> Committed | None:
        try:
            async with asyncio.timeout(timeout):
                result = await self._inbox.get()
        except TimeoutError:
            raise RunFailed(f"no progress for {timeout:g} s") from None
        if isinstance(result, Interrupted):
            raise result
        if isinstance(result.body, (Opened, Prefilled)):
            return None
        if isinstance(result.body, Committed) and result.header.base_length == len(self._log):
            return result.body
        raise RunFailed(f"the target worker said {result.body}")

    def _header(self) -> Header:
        return Header(self.sequence_id, self._epoch, len(self._log), self._log.digest)
