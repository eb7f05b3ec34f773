"""A worker's lease as the context manager that a worker process holds while new sequences are welcome."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from services.discovery import Lease
from services.redis_client import with_tls
from specdec.messages import Identity, Load

if TYPE_CHECKING:
    from services.settings import WorkerSettings


class Leased(Protocol):
    """What of a worker a lease tells."""

    @property
    def identity(self) -> Identity: ...

    def load(self) -> Load: ...


def make_lease(settings: WorkerSettings, worker: Leased) -> Callable[[str], AbstractAsyncContextManager[object]] | None:
    """From the address that is served to the lease; None without redis_url. What it makes raises RedisUnavailable for
    a wrong URL."""
    url = with_tls(settings.redis_url, settings.tls_ca, settings.tls_cert, settings.tls_key)
    if url is None:
        return None

    @asynccontextmanager
    async def lease(address: str) -> AsyncIterator[None]:
        held = Lease(url, worker.identity, settings.advertise or address, worker.load)
        await held.start()
        try:
            yield
        finally:
            await held.close()

    return lease
