"""A scheduler's stream on a worker: items in, results out, between the event loop and the worker's thread.

Both roles use it; `target_servicer` and `draft_servicer` add their codec.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from services import errors
from services.channel import TARGET_MESSAGE_BYTES
from services.codec import split
from services.errors import SlowReader
from services.progress import Progress
from specdec.log_extra import PRIVATE
from specdec.messages import Identity, Load

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
ItemIn = TypeVar("ItemIn", contravariant=True)
ResultOut = TypeVar("ResultOut")
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

MAX_PENDING_RESULTS = 16_384
"""Results that wait for a scheduler which does not read; beyond it the stream ends. A few MiB."""


class StreamWorker(Protocol[ItemIn, ResultOut]):
    """`TargetWorker` or `DraftWorker`. `deliver` is called on the worker's thread."""

    @property
    def identity(self) -> Identity: ...

    @property
    def crash(self) -> Exception | None:
        """What ended its loop, if anything did."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def attach(self, deliver: Callable[[list[ResultOut]], None]) -> int: ...

    def submit(self, session: int, items: Sequence[ItemIn]) -> None: ...

    def detach(self, session: int) -> None: ...

    def drain(self) -> None: ...

    def load(self) -> Load: ...


@dataclass(frozen=True)  # no slots: Python 3.11 cannot make a generic frozen one
class StreamCodec(Generic[Item, Result, Request, Response]):
    """decode: the good items of a message, and a result for each bad one. owes: the worker must answer this item."""

    decode: Callable[[Request], tuple[list[Item], list[Result]]]
    encode_result: Callable[[Result], Message]
    make_response: Callable[[list[Any]], Response]
    owes: Callable[[Item], bool]


class Outbox(Generic[Result]):
    """Results on their way out. Whatever waits when the stream can write travels in one message."""

    def __init__(self, limit: int, progress: Progress) -> None:
        """Call inside the event loop of the stream."""
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._progress = progress
        self._waiting: list[Result] = []
        self._filled = asyncio.Event()
        self._overflowed = asyncio.Event()
        self._finished = False

    def deliver(self, results: list[Result]) -> None:
        """From the worker's thread; must not raise there."""
        try:
            self._loop.call_soon_threadsafe(self._answered, results)
        except RuntimeError:  # the loop has ended, and the stream with it
            return

    def put(self, results: Iterable[Result]) -> None:
        self._waiting += results
        if len(self._waiting) > self._limit:
            self._waiting.clear()
            self._overflowed.set()
        elif self._waiting:
            self._filled.set()

    def finish(self) -> None:
        """Nothing more will be put."""
        self._finished = True
        self._filled.set()

    async def take(self) -> list[Result]:
        """All that waits, at least one; none means that it is finished."""
        if not self._finished:
            await self._filled.wait()
        self._filled.clear()
        taken, self._waiting = self._waiting, []
        return taken

    async def overflow(self) -> None:
        """Raises SlowReader as soon as more waits than the limit."""
        await self._overflowed.wait()
        raise SlowReader(f"more than {self._limit} results were waiting to be read")

    def _answered(self, results: list[Result]) -> None:
        self._progress.answered()
        if not self._overflowed.is_set():
            self.put(results)


class StreamServer(Generic[Item, Result, Request, Response]):
    """Serves the streams of all schedulers of one worker."""

    def __init__(
        self,
        worker: StreamWorker[Item, Result],
        codec: StreamCodec[Item, Result, Request, Response],
        progress: Progress,
        max_pending_results: int = MAX_PENDING_RESULTS,
    ) -> None:
        self._worker = worker
        self._codec = codec
        self._progress = progress
        self._max_pending_results = max_pending_results
        self._outboxes: set[Outbox[Result]] = set()

    @property
    def open_streams(self) -> int:
        return len(self._outboxes)

    def finish(self) -> None:
        """The worker has stopped: streams end as soon as what it delivered is written."""
        for outbox in self._outboxes:
            outbox.finish()

    async def serve(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> None:
        """Until the scheduler closes the stream or is lost: either way all that it opened here is released."""
        outbox = Outbox[Result](self._max_pending_results, self._progress)
        session = self._worker.attach(outbox.deliver)
        self._outboxes.add(outbox)
        slow: SlowReader | None = None
        try:
            # Tells the scheduler that the stream stands, before there is a first result.
            await context.send_initial_metadata(())
            await _first_to_end(
                self._receive(requests, outbox, session), self._send(outbox, context), outbox.overflow()
            )
        except SlowReader as error:
            slow = error
        finally:
            self._outboxes.discard(outbox)
            self._worker.detach(session)
        if slow is not None:
            await errors.abort(context, slow)

    async def _receive(self, requests: AsyncIterator[Request], outbox: Outbox[Result], session: int) -> None:
        async for request in requests:
            items, refusals = self._codec.decode(request)
            outbox.put(refusals)
            if any(self._codec.owes(item) for item in items):
                self._progress.owe()
            if items:
                self._worker.submit(session, items)

    async def _send(self, outbox: Outbox[Result], context: grpc.aio.ServicerContext[Request, Response]) -> None:
        while results := await outbox.take():
            for group in split(self._encoded(results), TARGET_MESSAGE_BYTES):
                await context.write(self._codec.make_response(group))

    def _encoded(self, results: Iterable[Result]) -> Iterator[Message]:
        """A result that no message can hold is a bug of its sequence; its neighbours travel on."""
        for result in results:
            try:
                yield self._codec.encode_result(result)
            except ValueError:
                log.exception("a result of %s cannot be sent", type(result).__name__, extra={PRIVATE: True})


async def _first_to_end(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends, stops the others, and raises what the first one raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
