"""What a stream to a worker costs on the wire, counted where messages become bytes: nothing is encoded twice for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from scheduler.counters import WIRE_BYTES, WIRE_MESSAGES
from specdec.messages import Role
from specdec.metric import Counters


class CountingChannel:
    """The part of a channel that a stub needs. Counts what the streams opened through it send and receive."""

    def __init__(self, channel: grpc.aio.Channel, counters: Counters, role: Role) -> None:
        self._channel = channel
        self._counters = counters
        self._role = role.value

    def __getattr__(self, name: str) -> Any:
        """What is no stream of both directions is passed on, and not counted."""
        return getattr(self._channel, name)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **more: Any,
    ) -> grpc.aio.StreamStreamMultiCallable[Any, Any]:
        def serialize(message: Any) -> bytes:
            data = request_serializer(message)
            self._count(len(data), "sent")
            return data

        def deserialize(data: bytes) -> Any:
            self._count(len(data), "received")
            return response_deserializer(data)

        return self._channel.stream_stream(method, serialize, deserialize, **more)

    def _count(self, size: int, direction: str) -> None:
        self._counters.add(WIRE_BYTES, size, self._role, direction)
        self._counters.add(WIRE_MESSAGES, 1, self._role, direction)
