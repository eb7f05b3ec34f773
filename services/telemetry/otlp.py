"""What every OTLP exporter of a process has in common: who it says it is, and how it reaches the collector."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource

from outrider.version import __version__

_CHATTY = ("opentelemetry.exporter.otlp.proto.grpc.exporter",)
"""Warns for every export that fails; those who export say it once."""


def resource(role: str, instance: str) -> Resource:
    """role: scheduler, target or draft. instance: the worker's or scheduler's id."""
    return Resource.create(
        {
            "service.name": f"outrider-{role}",
            "service.namespace": "outrider",
            "service.instance.id": instance,
            "service.version": __version__,
        }
    )


def channel_options(endpoint: str) -> Any:
    """A proxy that the environment names cannot reach this machine's own loopback."""
    host = urlsplit(endpoint).hostname or ""
    local = host == "localhost" or host == "::1" or host.startswith("127.")
    return (("grpc.enable_http_proxy", 0),) if local else None


def quieten() -> None:
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
