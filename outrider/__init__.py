"""The Python SDK of Outrider: `Client` and `AsyncClient` talk to a running deployment over gRPC.

Names are loaded on first use, so that `import outrider` stays cheap for those who only want the stubs (`outrider.v1`)
or the version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider.version import __version__

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Client
    from outrider.errors import OutriderError
    from outrider.events import (
        Choice,
        Completion,
        Event,
        Finished,
        Started,
        TokenLogprobs,
        Tokens,
        TokenSource,
        ToolCall,
    )

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "Event",
    "Finished",
    "OutriderError",
    "Started",
    "TokenLogprobs",
    "TokenSource",
    "Tokens",
    "ToolCall",
    "__version__",
]

_HOMES = {
    "AsyncClient": "outrider.client",
    "Choice": "outrider.events",
    "Client": "outrider.client",
    "Completion": "outrider.events",
    "Event": "outrider.events",
    "Finished": "outrider.events",
    "OutriderError": "outrider.errors",
    "Started": "outrider.events",
    "TokenLogprobs": "outrider.events",
    "TokenSource": "outrider.events",
    "Tokens": "outrider.events",
    "ToolCall": "outrider.events",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
