"""A gRPC server of ours: where it listens, what it speaks beside its services, how it ends.

Every server has health v1 (`startup`, `readiness`, `liveness`, and "" for readiness), reflection and channelz.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.start_error import StartError

MAX_MESSAGE_BYTES = 64 * 2**20
"""Senders split what is larger than `channel.TARGET_MESSAGE_BYTES`, so only a single huge item comes near it."""

MAX_SOCKET_PATH_BYTES = 107

HEALTH_SERVICES = ("startup", "readiness", "liveness")


class PortInUse(StartError):
    """Something else listens there. `address` is as it was configured."""

    def __init__(self, address: str) -> None:
        super().__init__(f"{address} is in use by another process")
        self.address = address


class CannotListen(StartError):
    """The address is not ours to listen on, or not an address; or a TLS file cannot be read."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, read anew when they change. With `client_ca` a client must show a certificate of that authority."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a file does. Raises OSError."""
        files = (self.certificate, self.key, *([self.client_ca] if self.client_ca else []))
        return tuple((stat.st_mtime_ns, stat.st_size) for stat in (file.stat() for file in files))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """addresses: `HOST:PORT` (0 picks a free port) or `unix:PATH`. Durations in seconds.

    health_address: one more, for health alone and without TLS, which probes of Kubernetes cannot speak.
    keepalive_time, keepalive_timeout: a silent peer is asked after the one and given up after the other.
    min_ping_interval: clients that ask more often are sent away.
    """

    addresses: tuple[str, ...]
    tls: TlsFiles | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    keepalive_time: float = 10.0
    keepalive_timeout: float = 5.0
    min_ping_interval: float = 0.2
    health_address: str | None = None

    def options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", round(self.keepalive_time * 1000)),
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_ping_interval * 1000)),
        ]


class Server:
    """One `grpc.aio` server. Add servicers to `grpc`, `start`, and in the end `drain`."""

    def __init__(self, config: ServerConfig, interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = ()) -> None:
        """Call inside the event loop that will run it."""
        self.config = config
        self.grpc = grpc.aio.server(interceptors=interceptors, options=config.options())
        self.addresses: tuple[str, ...] = ()
        self._health_address = ""
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._health_grpc = grpc.aio.server(options=config.options()) if config.health_address else None
        for server in filter(None, (self.grpc, self._health_grpc)):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self, service_names: Sequence[str]) -> tuple[str, ...]:
        """Listens. Returns the addresses with their real ports. Raises PortInUse, CannotListen.

        service_names: full names of the added services, for reflection.
        """
        channelz.add_channelz_servicer(self.grpc)  # type: ignore[arg-type]
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME, "grpc.channelz.v1.Channelz")
        reflection.enable_server_reflection(names, self.grpc)
        for service in ("", "startup", "readiness"):
            await self.set_health(service, False)
        await self.set_health("liveness", True)
        try:
            for address in self.config.addresses:
                self.addresses += (_bind(self.grpc, address, self.config.tls),)
            if self._health_grpc is not None and self.config.health_address:
                self._health_address = _bind(self._health_grpc, self.config.health_address, None)
        except StartError:
            await self._start()  # only a started server gives back what it has bound
            await self.drain(0)
            raise
        await self._start()
        return self.addresses

    async def _start(self) -> None:
        await self.grpc.start()
        if self._health_grpc is not None:
            await self._health_grpc.start()

    async def set_health(self, service: str, serving: bool) -> None:
        """service: "" or one of HEALTH_SERVICES. Watchers are told."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def set_ready(self, ready: bool) -> None:
        """Sets `readiness` and "", and `startup` once it is true."""
        await self.set_health("readiness", ready)
        await self.set_health("", ready)
        if ready:
            await self.set_health("startup", True)

    async def drain(self, grace: float) -> None:
        """Takes no new calls, gives running ones `grace` seconds, then cancels them. Removes its unix sockets."""
        await self.set_ready(False)
        await self.grpc.stop(grace)
        if self._health_grpc is not None:
            await self._health_grpc.stop(0)
        for address in (*self.addresses, self._health_address):
            _remove_socket(address)


def _bind(server: grpc.aio.Server, address: str, tls: TlsFiles | None) -> str:
    """The address with its real port. Raises StartError."""
    if address.startswith("unix:"):
        _check_socket_path(address)
    else:
        _check_host_and_port(address)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise _bind_error(address) from error
    if address.startswith("unix:"):
        os.chmod(address.removeprefix("unix:"), 0o600)
        return address
    host, _, _ = address.rpartition(":")
    return f"{host}:{port}"


def _remove_socket(address: str) -> None:
    if address.startswith("unix:"):
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def _check_socket_path(address: str) -> None:
    """gRPC removes a socket file that is in the way even when a live process listens on it, so look first."""
    path = Path(address.removeprefix("unix:"))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise CannotListen(f"{address}: the path of a unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise CannotListen(f"{address}: no folder {path.parent}")
    if path.exists() and not path.is_socket():
        raise CannotListen(f"{address}: a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise CannotListen(f"{address}: {error.strerror or error}") from error
    raise PortInUse(address)


def _check_host_and_port(address: str) -> None:
    """gRPC takes an address without port, or with one that is too large, and listens somewhere else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise CannotListen(f"{address} is no address: write HOST:PORT or unix:PATH")


def _bind_error(address: str) -> StartError:
    """gRPC does not say why it could not bind; the system does."""
    host, _, port = address.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return CannotListen(f"{address}: {error.strerror or error}")
    for family, kind, protocol, _, where in resolved:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
                probe.listen()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return CannotListen(f"{address}: {error.strerror or error}")
    return PortInUse(address)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Reloads the files when they change, so that a certificate is renewed without a restart."""
    return grpc.dynamic_ssl_server_credentials(
        _certificates(tls),
        _Reload(tls),  # type: ignore[arg-type]  # the stubs do not know that None is "unchanged"
        require_client_authentication=tls.client_ca is not None,
    )


def _certificates(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    try:
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        roots = tls.client_ca.read_bytes() if tls.client_ca else None
    except OSError as error:
        raise CannotListen(f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


class _Reload:
    """Called by gRPC at each handshake; None keeps what it has."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._seen = tls.stamp()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            stamp = self._tls.stamp()
            if stamp == self._seen:
                return None
            certificates = _certificates(self._tls)
        except (OSError, CannotListen):
            return None
        self._seen = stamp
        return certificates
