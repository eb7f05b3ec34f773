"""One way to make a Redis client: by URL, with hiredis, without hidden retries, and with errors fit for one line."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio import Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.start_error import ExitCode, StartError

SCHEMES = ("redis", "rediss", "unix")

REDIS_FAILURES = (RedisError, OSError, TimeoutError)
"""What a command may raise when Redis is down, slow, read-only or full."""


class RedisUnavailable(StartError):
    """Redis cannot be reached, or its URL is wrong. The message is one line and names the cure."""


def connect(url: str, *, socket_timeout: float = 2.0, connect_timeout: float = 1.0) -> Redis:
    """A client that connects at its first command. Retrying is the caller's, so that each state change is seen.

    Raises RedisUnavailable for a URL that is not `redis://`, `rediss://` or `unix://`.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise RedisUnavailable(
            f"redis_url {without_password(url)!r}: must start with redis://, rediss:// or unix://", ExitCode.WRONG_USE
        )
    try:
        client = Redis.from_url(
            url,
            socket_timeout=socket_timeout,
            socket_connect_timeout=connect_timeout,
            retry=Retry(NoBackoff(), 0),
            client_name="outrider",
        )
        if scheme == "rediss":
            client.connection_pool.connection_class = _FreshSslConnection
        return client
    except ValueError as error:
        raise RedisUnavailable(f"redis_url {without_password(url)!r}: {error}", ExitCode.WRONG_USE) from None


class _FreshSslConnection(SSLConnection):
    """Reads certificate, key and roots at each connect, so that renewed ones are used without a restart."""

    async def connect(self) -> None:
        self.ssl_context.context = None
        await super().connect()  # type: ignore[no-untyped-call]


def with_tls(url: str | None, ca: Path | None, certificate: Path | None, key: Path | None) -> str | None:
    """A `rediss://` URL with the files of the deployment, where it does not name files of its own."""
    if url is None or urlsplit(url).scheme != "rediss":
        return url
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    for name, file in (("ssl_ca_certs", ca), ("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if file is not None:
            query.setdefault(name, str(file))
    return parts._replace(query=urlencode(query)).geturl()


async def require(url: str, seconds: float = 5.0) -> None:
    """Returns once Redis answered; raises RedisUnavailable if it did not within `seconds`."""
    client = connect(url)
    give_up = time.monotonic() + seconds
    try:
        while True:
            try:
                await client.ping()
                return
            except REDIS_FAILURES as error:
                if time.monotonic() >= give_up or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                    raise RedisUnavailable(
                        f"cannot reach Redis at {without_password(url)} ({one_line(error)}): start it, "
                        "correct redis_url, or leave redis_url out to use the embedded one"
                    ) from None
                await asyncio.sleep(0.1)
    finally:
        await client.aclose()


async def end(task: asyncio.Task[None]) -> None:
    """Cancels a task that uses Redis until it is over: a client that is just connecting may swallow a cancel."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.05)


def without_password(url: str) -> str:
    """The URL as it may be logged: without the options behind it, too."""
    parts = urlsplit(url)._replace(query="")
    if "@" not in parts.netloc:
        return parts.geturl()
    return parts._replace(netloc="***@" + parts.netloc.rsplit("@", 1)[1]).geturl()


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
