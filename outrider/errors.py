"""What can go wrong with a call of the SDK. Every message is one line fit for the user.

OutriderError
├── ServerUnreachable      nobody answers there, or the connection broke
├── AuthenticationFailed   no valid API key
├── InvalidRequest         a field is out of range; `field` names it
├── ModelNotFound          that model is not served
├── Overloaded             no room now; `retry_after` says when to come back
├── Unavailable            no live target within the time allowed
├── DeadlineExceeded       the call's own timeout passed
└── ServerError            anything else; `reason` is the server's
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

DETAILS_KEY = "grpc-status-details-bin"


class OutriderError(Exception):
    """reason: a stable name for programs, such as INVALID_REQUEST; empty if the server gave none."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ServerUnreachable(OutriderError):
    pass


class AuthenticationFailed(OutriderError):
    pass


class InvalidRequest(OutriderError):
    def __init__(self, message: str, reason: str = "INVALID_REQUEST", field: str = "") -> None:
        super().__init__(message, reason)
        self.field = field


class ModelNotFound(OutriderError):
    pass


class Overloaded(OutriderError):
    """retry_after: seconds; None if the server did not say."""

    def __init__(self, message: str, reason: str = "OVERLOADED", retry_after: float | None = None) -> None:
        super().__init__(message, reason)
        self.retry_after = retry_after


class Unavailable(OutriderError):
    pass


class DeadlineExceeded(OutriderError):
    pass


class ServerError(OutriderError):
    pass


_CLASSES: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationFailed,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def from_rpc(error: grpc.aio.AioRpcError, address: str, tokens: int | None = None) -> OutriderError:
    """tokens: how many had arrived; None if not even the first event had."""
    code = error.code()
    status = _status(error)
    message = " ".join((error.details() or code.name).split())
    if status is None and code is grpc.StatusCode.UNAVAILABLE:
        if tokens is None:
            return ServerUnreachable(f"no server at {address}: start one with `outrider up` ({message})")
        return ServerUnreachable(f"the connection to {address} broke after {tokens} tokens: {message}")
    if status is None and code is grpc.StatusCode.DEADLINE_EXCEEDED:  # our side gave up, in gRPC's words
        return DeadlineExceeded("the answer took longer than the timeout: allow more, or ask for fewer tokens")
    info, retry_after = _details(status)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(message, info.reason, info.metadata.get("field", ""))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, info.reason, retry_after)
    return _CLASSES.get(code, ServerError)(message, info.reason)


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The `google.rpc.Status` that our servers send; what fails in between sends none."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return None


def _details(status: status_pb2.Status | None) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after: float | None = None
    for detail in status.details if status is not None else ():
        if detail.Unpack(retry):
            retry_after = float(retry.retry_delay.ToNanoseconds() / 1e9)
        else:
            detail.Unpack(info)
    return info, retry_after
