"""The scheduler's end of one stream to one worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from scheduler.links import LinkError
from services import errors
from services.channel import TARGET_MESSAGE_BYTES
from services.codec import split

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_QUEUED_ITEMS = 65_536
"""Items that wait for a worker which does not read; beyond it the worker counts as lost."""

CLOSE_TIMEOUT = 1.0
"""Seconds that a worker has to take the last items and answer an explicit close."""


@contextlib.contextmanager
def link_errors() -> Iterator[None]:
    """What gRPC raises becomes LinkError. A call that ended because its channel was closed looks like a cancelled
    task; only a task that really is cancelled may see it as one."""
    try:
        yield
    except grpc.RpcError as error:
        raise LinkError(errors.describe(error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise LinkError("the link was closed") from None


@dataclass(frozen=True)  # no slots: Python 3.11 cannot make a generic frozen one
class LinkCodec(Generic[Item, Result]):
    """request: a message with repeated `items`; fill puts an item into one of those. refuse: the result that stands
    for an item which no message can hold."""

    request: Callable[..., Any]
    fill: Callable[[Item, Any], None]
    decode: Callable[[Any], list[Result]]
    refuse: Callable[[Item, str], Result]


class LinkStream(Generic[Item, Result]):
    """Sends and receives until `close`, or until it breaks: then `lost` is called, once, with the cause.

    Everything happens in the event loop; `deliver` and `lost` too.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Any, Any],
        codec: LinkCodec[Item, Result],
        deliver: Callable[[Sequence[Result]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._call = call
        self._codec = codec
        self._deliver = deliver
        self._lost = lost
        self._queue: list[Item] = []
        self._queued = asyncio.Event()
        self._closing = False
        self._ended = False
        self._work: asyncio.Task[None] | None = None

    async def start(self, within: float) -> None:
        """Waits until the worker took the stream. Raises LinkError; `lost` is not called then."""
        try:
            async with asyncio.timeout(within):
                with link_errors():
                    await self._call.initial_metadata()
                    # A call that was refused has metadata too, and is over.
                    if self._call.done():
                        raise LinkError(await self._cause())
        except TimeoutError as error:
            self._call.cancel()
            raise LinkError(f"no answer within {within:g} s") from error
        except BaseException:
            self._call.cancel()
            raise
        self._work = asyncio.create_task(self._run())

    def send(self, items: Sequence[Item]) -> None:
        """Queues; items queued in one turn of the event loop travel in one message."""
        if self._ended or self._closing:
            return
        if items and not self._queue:
            self._queued.set()
        self._queue += items
        if len(self._queue) > MAX_QUEUED_ITEMS:
            # Not from inside the caller's own `send`.
            cause = f"more than {MAX_QUEUED_ITEMS} items were waiting for the worker to read them"
            asyncio.get_running_loop().call_soon(self._lose, cause)

    async def close(self) -> None:
        """Tells the worker that this end is meant; never calls `lost`."""
        self._closing = True
        self._queued.set()
        if self._work is None:
            self._call.cancel()
            return
        try:
            await asyncio.wait([self._work], timeout=CLOSE_TIMEOUT)
        finally:
            self._call.cancel()
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _run(self) -> None:
        """Both directions; the one that ends first ends the stream."""
        receiver = asyncio.create_task(self._receive())
        sender = asyncio.create_task(self._send())
        cause = "the stream was cancelled"
        try:
            await asyncio.wait([receiver, sender], return_when=asyncio.FIRST_COMPLETED)
            if sender.done() and sender.exception() is None:  # an explicit close: the worker ends the stream
                await receiver
            elif sender.done() and not receiver.done():  # only the receiving side learns why
                await asyncio.wait([receiver], timeout=CLOSE_TIMEOUT)
            cause = await self._cause() if self._call.done() else _failure(receiver, sender)
        except grpc.RpcError as error:
            cause = errors.describe(error)
        finally:
            self._call.cancel()
            for task in (receiver, sender):
                task.cancel()
            await asyncio.gather(receiver, sender, return_exceptions=True)
            self._lose(cause)

    async def _receive(self) -> None:
        async for response in self._call:
            results = self._codec.decode(response)
            if results and not self._ended and not self._closing:
                self._deliver(results)

    async def _send(self) -> None:
        """Until the stream is closed and everything queued before that is written."""
        while not (self._closing and not self._queue):
            await self._queued.wait()
            self._queued.clear()
            items, self._queue = self._queue, []
            for request in self._requests(items):
                await self._call.write(request)
        await self._call.done_writing()

    def _requests(self, items: Sequence[Item]) -> list[Message]:
        """All items in one message, unless that would be too large."""
        request = self._codec.request()
        for item in items:
            try:
                self._codec.fill(item, request.items.add())
            except ValueError as error:
                del request.items[-1]
                log.error("an item cannot be sent: %s", error)
                self._deliver([self._codec.refuse(item, str(error))])
        if request.ByteSize() > TARGET_MESSAGE_BYTES:
            return [self._codec.request(items=group) for group in split(request.items, TARGET_MESSAGE_BYTES)]
        return [request] if request.items else []

    async def _cause(self) -> str:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return "the worker ended the stream"
        name = code.name.lower().replace("_", " ")
        return f"{name}: {details}" if details else name

    def _lose(self, cause: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._queue.clear()
        self._call.cancel()
        if not self._closing:
            self._lost(cause)


def _failure(*tasks: asyncio.Task[None]) -> str:
    """Something in this process failed, not the worker."""
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if error is not None:
            log.error("a worker stream failed here", exc_info=error)
            return f"internal error: {error!r}"
    return "the stream ended"
