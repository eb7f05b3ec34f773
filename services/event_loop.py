"""The event loop of a serving process: uvloop where it is installed, which takes less CPU time per round."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any


def run(work: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`."""
    if importlib.util.find_spec("uvloop") is None:  # there is none for Windows, nor for PyPy
        asyncio.run(work)
        return
    import uvloop

    uvloop.run(work)
