"""Work that ends with the client it is for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`, and cancels it as soon as the client has gone. Raises what it raises."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """The body has been read, so what comes is the end of the connection, or of the response."""
    while (await receive())["type"] != "http.disconnect":
        pass
