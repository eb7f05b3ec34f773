"""The one table from what went wrong to what the caller is told: gRPC code, HTTP status, reason.

Servers raise; `abort` (gRPC) and `classify` (HTTP) read the table. Clients turn a status back into one line with
`describe`. The reason is public and stable: a program may compare it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from scheduler.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestError,
    SequenceFailed,
    Unavailable,
)
from scheduler.links import LinkError
from services.codec import InvalidMessage, encode_duration
from specdec.log_extra import PRIVATE

log = logging.getLogger(__name__)

DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"


class Unauthenticated(Exception):
    """The call carries no key that is known. The message is fit for the caller."""


class SlowReader(Exception):
    """The peer of a stream does not read what it asked for."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """public: the exception's own message is fit for the caller; else it is logged and replaced."""

    code: grpc.StatusCode
    http_status: int
    reason: str
    public: bool = True


TABLE: dict[type[BaseException], ErrorKind] = {
    InvalidRequest: ErrorKind(grpc.StatusCode.INVALID_ARGUMENT, 400, "INVALID_REQUEST"),
    InvalidMessage: ErrorKind(grpc.StatusCode.INVALID_ARGUMENT, 400, "INVALID_MESSAGE"),
    Unauthenticated: ErrorKind(grpc.StatusCode.UNAUTHENTICATED, 401, "UNAUTHENTICATED"),
    ModelNotFound: ErrorKind(grpc.StatusCode.NOT_FOUND, 404, "MODEL_NOT_FOUND"),
    Overloaded: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "OVERLOADED"),
    SlowReader: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "SLOW_READER"),
    Unavailable: ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, "UNAVAILABLE"),
    LinkError: ErrorKind(grpc.StatusCode.UNAVAILABLE, 503, "WORKER_UNREACHABLE"),
    DeadlineExceeded: ErrorKind(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "DEADLINE_EXCEEDED"),
    SequenceFailed: ErrorKind(grpc.StatusCode.INTERNAL, 500, "SEQUENCE_FAILED"),
    RequestError: ErrorKind(grpc.StatusCode.INTERNAL, 500, "REQUEST_FAILED"),
    Exception: ErrorKind(grpc.StatusCode.INTERNAL, 500, "INTERNAL", public=False),
}


def classify(error: BaseException) -> ErrorKind:
    """The row of the nearest class of `error`."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return TABLE[Exception]


def public_message(error: BaseException) -> str:
    """What the caller may read: one line."""
    if not classify(error).public:
        return "internal error; see the server's log"
    return " ".join(str(error).split()) or type(error).__name__


def to_status(error: BaseException) -> status_pb2.Status:
    """`google.rpc.Status` with `ErrorInfo`, and `RetryInfo` where it is known when to come back."""
    kind = classify(error)
    info = error_details_pb2.ErrorInfo(reason=kind.reason, domain=DOMAIN)
    if isinstance(error, (InvalidRequest, InvalidMessage)):
        info.metadata["field"] = error.field
    status = status_pb2.Status(code=_code_number(kind.code), message=public_message(error))
    status.details.append(_packed(info))
    if isinstance(error, Overloaded):
        delay = encode_duration(error.retry_after)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends the call with the status of `error`. What the caller may not see is logged here."""
    kind = classify(error)
    if not kind.public:
        log.error("call failed", exc_info=error, extra={PRIVATE: True})
    status = to_status(error)
    metadata = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(kind.code, status.message, metadata)
    raise AssertionError("abort returns never")


def status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    """The `google.rpc.Status` that came with a failed call, if one did."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return None
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return None


def error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """Reason and, where one is to blame, the field."""
    status = status_of(error)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return info
    return None


def retry_after(error: grpc.RpcError) -> float | None:
    """Seconds until a retry may succeed; None if the server did not say."""
    status = status_of(error)
    retry = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToNanoseconds() / 1e9)
    return None


def describe(error: grpc.RpcError) -> str:
    """One line for a user or a log: the server's message, or what gRPC says of the connection."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error)
    message = " ".join((error.details() or "").split())
    if status_of(error) is not None:
        return message
    name = error.code().name.lower().replace("_", " ")
    return f"{name}: {message}" if message else name


def _code_number(code: grpc.StatusCode) -> int:
    return int(code_pb2.Code.Value(code.name))


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
