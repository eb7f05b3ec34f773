"""What happens to a call before its servicer: is the caller allowed to call?"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from services.errors import Unauthenticated, abort

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Probes carry no key, and learn nothing but up or down."""
SCHEME = "bearer "


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic in its stubs alone


class ApiKeyInterceptor(_Interceptor):
    """Wants `authorization: Bearer KEY` on every method but those of health. Keys are kept and compared as hashes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        if str(handler_call_details.method).startswith(HEALTH_PREFIX) or self._allows(handler_call_details):
            return await continuation(handler_call_details)
        # Answers a method of any kind, before it reads a message.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _allows(self, details: grpc.HandlerCallDetails) -> bool:
        """Compares with every key, so that the time tells nothing."""
        metadata = dict(details.invocation_metadata or ())
        value = metadata.get("authorization", "")
        if not isinstance(value, str) or not value.lower().startswith(SCHEME):
            return False
        digest = _digest(value[len(SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await abort(context, Unauthenticated("no valid API key: send `authorization: Bearer KEY`"))
