"""Running a command's coroutine so that Ctrl-C always ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, where no Ctrl-C is lost. Raises KeyboardInterrupt once `work` has been cancelled and has ended.

    asyncio's own handler is Python code, which runs when the main thread comes back from waiting for sockets. A signal
    that comes just before it waits, or reaches another thread, ends no wait: with a silent server it would not be
    noticed.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are no other thread's business
        return asyncio.run(work)

    async def woken() -> Result:
        async with _woken_by_signals():
            return await work

    return asyncio.run(woken())


@asynccontextmanager
async def _woken_by_signals() -> AsyncIterator[None]:
    """Every signal writes a byte to a socket that the event loop looks at."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        loop.add_reader(ours, ours.recv, 4096)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(ours)
