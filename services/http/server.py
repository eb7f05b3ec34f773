"""The HTTP server: uvicorn in our own event loop, listening before it says so, and ended by us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.server import TlsFiles
from services.start_error import StartError

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 60
BACKLOG = 2048


class HttpServer:
    """`start`, and in the end `close`. Port 0 is a free one."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: TlsFiles | None = None) -> None:
        self._app = app
        self._host = host.strip("[]")
        self._port = port
        self._tls = tls
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Returns the URL with the real port. Raises StartError."""
        listening = listen(self._host, self._port)
        config = uvicorn.Config(
            self._app,
            http="httptools",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ssl_certfile=self._tls.certificate if self._tls else None,
            ssl_keyfile=self._tls.key if self._tls else None,
        )
        try:
            renewal = Renewal(self._tls) if self._tls else None
            config.load()
        except OSError as error:
            listening.close()
            raise StartError(f"cannot read tls_cert or tls_key: {error.strerror or error}") from error
        self._server = _Server(config, renewal)
        self._serving = asyncio.create_task(self._server.serve([listening]))
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait([self._serving, started], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            self._serving.result()
        scheme = "http" if self._tls is None else "https"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{scheme}://{host}:{listening.getsockname()[1]}"

    async def close(self, grace: float) -> None:
        """Takes no new requests, gives running ones `grace` seconds, then cancels them."""
        if self._server is None or self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.end()
        await self._serving


class Renewal:
    """Certificate and key, taken over when their files change, for handshakes from then on."""

    def __init__(self, tls: TlsFiles) -> None:
        """Raises OSError if a file cannot be read."""
        self._tls = tls
        self._seen = tls.stamp()
        self._complained = False

    def into(self, context: ssl.SSLContext) -> None:
        """What cannot be read, or does not fit together, changes nothing and is tried again."""
        try:
            stamp = self._tls.stamp()
            if stamp == self._seen:
                return
            # A context keeps a certificate whose key it then refuses: try them on another one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._tls.certificate, self._tls.key)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        except OSError as error:
            if not self._complained:
                log.warning("HTTP keeps its certificate, the new one cannot be used: %s", error)
            self._complained = True
            return
        self._seen, self._complained = stamp, False
        log.info("HTTP has taken over the new certificate")


class _Server(uvicorn.Server):
    """Leaves the signals to the process, and ends when it is told to."""

    def __init__(self, config: uvicorn.Config, renewal: Renewal | None) -> None:
        super().__init__(config)
        self._renewal = renewal
        self.has_started = asyncio.Event()
        self._ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        """As the original, which looks ten times a second whether it has ended."""
        while not await self.on_tick(0):  # at 0 it renews the date
            if self._renewal is not None and isinstance(self.config.ssl, ssl.SSLContext):
                self._renewal.into(self.config.ssl)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ended.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Raises StartError if the address is not ours to listen on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartError(f"http_host {host!r} is no address of this machine: {error.strerror}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        reason = os.strerror(error.errno or 0)
        raise StartError(f"port {port} on {host} is taken ({reason}): choose another one with --http-port") from error
    return listening
