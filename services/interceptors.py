"""What happens to a call before its servicer: is the caller allowed to call?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from services.api_keys import REFUSAL, ApiKeys
from services.errors import Unauthenticated, abort

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Probes carry no key, and learn nothing but up or down."""

if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic in its stubs alone


class ApiKeyInterceptor(_Interceptor):
    """Wants `authorization: Bearer KEY` on every method but those of health."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = ApiKeys(keys)

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
        value = dict(details.invocation_metadata or ()).get("authorization", "")
        return isinstance(value, str) and self._keys.allow(value)


async def _refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await abort(context, Unauthenticated(REFUSAL))
