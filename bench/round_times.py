"""How long a scheduler process holds a round: from the draft's arrival to the verify on its way, and from the verdict's
arrival to the event on its way.

It looks at the three streams from outside: what gRPC hands over, before it is decoded, and when a write has returned.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO

from outrider.v1 import draft_service_pb2, target_service_pb2
from services.generation_servicer import GenerationServicer
from services.links import GrpcDraftLink, GrpcTargetLink


class RoundTimes:
    """By sequence: arrivals whose answer is not sent yet. Writes a line per round: both parts, in milliseconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drafts: dict[str, float] = {}
        self._to_verify: dict[str, float] = {}
        self._verdicts: dict[str, deque[tuple[float, float]]] = defaultdict(deque)

    def received(self, response: Any) -> None:
        now = time.perf_counter()
        if isinstance(response, draft_service_pb2.DraftResponse):
            for draft in response.results:
                if draft.HasField("block"):
                    self._drafts[draft.header.sequence_id] = now
            return
        for verdict in response.results:
            name = verdict.header.sequence_id
            if verdict.HasField("committed") and name in self._to_verify:
                self._verdicts[name].append((now, self._to_verify.pop(name)))

    def sent(self, request: Any) -> None:
        if not isinstance(request, target_service_pb2.VerifyRequest):
            return
        now = time.perf_counter()
        for item in request.items:
            name = item.header.sequence_id
            if item.HasField("verify") and name in self._drafts:
                self._to_verify[name] = now - self._drafts.pop(name)

    def written(self, sequence_id: str) -> None:
        """An event of tokens."""
        if self._verdicts[sequence_id]:
            received, to_verify = self._verdicts[sequence_id].popleft()
            to_event = time.perf_counter() - received
            self._out.write(f"{to_verify * 1e3:.4f} {to_event * 1e3:.4f}\n")

    def ended(self, sequence_id: str) -> None:
        self._drafts.pop(sequence_id, None)
        self._to_verify.pop(sequence_id, None)
        self._verdicts.pop(sequence_id, None)


class _Call:
    """A worker stream that is watched."""

    def __init__(self, call: Any, times: RoundTimes) -> None:
        self._call = call
        self._times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def write(self, request: Any) -> None:
        await self._call.write(request)
        self._times.sent(request)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for response in self._call:
            self._times.received(response)
            yield response


class _Context:
    """A user's stream that is watched."""

    def __init__(self, context: Any, times: RoundTimes) -> None:
        self._context = context
        self._times = times
        self.sequence_id = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: Any) -> None:
        await self._context.write(response)
        if response.HasField("started"):
            self.sequence_id = response.started.sequence_id
        elif response.HasField("tokens"):
            self._times.written(self.sequence_id)


def install(path: Path) -> None:
    """Watches every link and every servicer made in this process from now on."""
    times = RoundTimes(path.open("w", buffering=1))  # a line is there before its answer ends
    for link in (GrpcDraftLink, GrpcTargetLink):
        _watch_link(link, times)
    generate = GenerationServicer.Generate

    async def watched(self: GenerationServicer, request: Any, context: Any) -> None:
        seen = _Context(context, times)
        try:
            await generate(self, request, seen)  # type: ignore[arg-type]
        finally:
            times.ended(seen.sequence_id)

    GenerationServicer.Generate = watched  # type: ignore[method-assign]


def _watch_link(link: type[GrpcDraftLink] | type[GrpcTargetLink], times: RoundTimes) -> None:
    call = link._call
    link._call = lambda self: _Call(call(self), times)  # type: ignore[method-assign,assignment]
