"""The Python SDK of Outrider: `Client` and `AsyncClient` talk to a running deployment over gRPC.

The clients are loaded on first use, so that `import outrider` stays cheap for those who only want the stubs
(`outrider.v1`) or the version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.version import __version__

if TYPE_CHECKING:
    from outrider.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

_LAZY = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from outrider import client

        return getattr(client, name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
