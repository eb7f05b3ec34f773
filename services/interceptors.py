"""What happens to a call before its servicer: is the caller allowed to call? And around it: how did it end?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc

from services.api_keys import REFUSAL, ApiKeys
from services.errors import Unauthenticated, abort
from services.telemetry.tracing_calls import Calls
from services.telemetry.tracing_context import Call

HEALTH_PREFIX = "/grpc.health.v1.Health/"
"""Probes carry no key, and learn nothing but up or down."""

TRACED_METHODS = (
    "/outrider.v1.GenerationService/Generate",
    "/outrider.v1.TargetService/Verify",
    "/outrider.v1.DraftService/Draft",
)
"""Those that do work; all write through their context, so that a cancel reaches them."""

SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Codes by which a server's span counts as failed, as OpenTelemetry has it: others are the caller's own doing."""

_CANCEL_SECONDS = 0.1
"""By then a cancel, or the loss of the caller, reaches the task of a handler whose requests it has ended."""

_EARLY_SHARE, _EARLY_SECONDS = 0.01, 0.01
"""So much earlier than here a deadline may end at the caller, who then cancels: it travels in two or three digits,
rounded up."""

if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic in its stubs alone


class ApiKeyInterceptor(_Interceptor):
    """Wants `authorization: Bearer KEY` on every method but those of health."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = ApiKeys(keys)

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        if str(handler_call_details.method).startswith(HEALTH_PREFIX) or self._allows(handler_call_details):
            return await continuation(handler_call_details)
        # Answers a method of any kind, before it reads a message.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _allows(self, details: grpc.HandlerCallDetails) -> bool:
        return self._keys.allow(_text_metadata(details).get("authorization", ""))


class TracingInterceptor(_Interceptor):
    """Makes each call of TRACED_METHODS the span above what is done for it, with the status that the caller sees."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        handler: _Handler | None = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method not in TRACED_METHODS:
            return handler  # type: ignore[return-value]  # None: nobody serves this method
        metadata = _text_metadata(handler_call_details)
        serving = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._traced(method, metadata, handler.stream_stream, True), *serving
            )
        return grpc.unary_stream_rpc_method_handler(
            self._traced(method, metadata, handler.unary_stream, False), *serving
        )

    def _traced(self, method: str, metadata: Mapping[str, str], behavior: Any, streaming: bool) -> Any:
        async def traced(request: Any, context: _Context) -> None:
            with self._calls.answering(metadata.get("traceparent", ""), metadata.get("tracestate", "")) as call:
                code, allowed = grpc.StatusCode.UNKNOWN, context.time_remaining()
                try:
                    await behavior(request, context)
                    if streaming:  # one whose caller is gone looks closed at first
                        await asyncio.sleep(_CANCEL_SECONDS)
                    late = streaming and _late(context, allowed)
                    code = _told(context) or (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.OK)
                except asyncio.CancelledError:
                    code = _cancelled(call, context, allowed)
                    raise
                except BaseException:
                    code = _told(context) or grpc.StatusCode.UNKNOWN
                    raise
                finally:
                    self._end(call, method, code)

        return traced

    def _end(self, call: Call, method: str, code: grpc.StatusCode) -> None:
        name = method.removeprefix("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": code.name}
        failed = code in SERVER_FAULTS
        self._calls.end(call, name, {**attributes, **({"error.type": code.name} if failed else {})}, code.name * failed)


def _told(context: _Context) -> grpc.StatusCode | None:
    """What the servicer set; None if nothing. The stubs know no None."""
    return cast(Any, context).code()  # type: ignore[no-any-return]


def _cancelled(call: Call, context: _Context, allowed: float | None) -> grpc.StatusCode:
    """What ended the handler from outside."""
    if call.answered:
        return grpc.StatusCode.OK
    return grpc.StatusCode.DEADLINE_EXCEEDED if _late(context, allowed) else grpc.StatusCode.CANCELLED


def _late(context: _Context, allowed: float | None) -> bool:
    """Whether the caller's deadline is over. allowed: seconds that were left at the start; None without a deadline."""
    return allowed is not None and context.time_remaining() <= allowed * _EARLY_SHARE + _EARLY_SECONDS


async def _refuse(requests: object, context: _Context) -> NoReturn:
    await abort(context, Unauthenticated(REFUSAL))


def _text_metadata(details: grpc.HandlerCallDetails) -> dict[str, str]:
    pairs = details.invocation_metadata or ()
    return {key: value for key, value in pairs if isinstance(value, str)}
