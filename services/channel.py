"""Client channels between our own parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from services.server import MAX_MESSAGE_BYTES

TARGET_MESSAGE_BYTES = 4 * 2**20
"""Batches are split at about this size; a single larger item still travels, up to MAX_MESSAGE_BYTES."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: whom to trust, and who we are to servers that ask. server_name: what the server's certificate must
    carry, if not the host of its address. Read when a channel is opened."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """Durations in seconds. A frozen peer is noticed after keepalive_time + keepalive_timeout at the latest.

    keepalive_time must not be below the server's `min_ping_interval`, which would send us away.
    """

    keepalive_time: float = 1.0
    keepalive_timeout: float = 1.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    tls: ClientTls | None = None

    def options(self) -> list[tuple[str, int | str]]:
        named = self.tls.server_name if self.tls else None
        return [
            ("grpc.keepalive_time_ms", round(self.keepalive_time * 1000)),
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            # Retry of an open stream is the scheduler's, which knows what a retry would repeat.
            ("grpc.enable_retries", 0),
            # A link that is made anew must not inherit the back-off of the one that broke.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.max_reconnect_backoff_ms", 5000),
            *([("grpc.ssl_target_name_override", named)] if named else []),
        ]


def open_channel(address: str, config: ChannelConfig | None = None) -> grpc.aio.Channel:
    """address: `HOST:PORT` or `unix:PATH`. Call inside the event loop that will use it; connects on first use."""
    config = config or ChannelConfig()
    if config.tls is None:
        return grpc.aio.insecure_channel(address, options=config.options())
    return grpc.aio.secure_channel(address, _credentials(config.tls), options=config.options())


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Raises OSError if a file cannot be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca.read_bytes(),
        private_key=tls.key.read_bytes() if tls.key else None,
        certificate_chain=tls.certificate.read_bytes() if tls.certificate else None,
    )
