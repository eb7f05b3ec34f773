"""One table: what went wrong -> gRPC code, HTTP status, reason; and back to one line at the client."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]

from scheduler.errors import InvalidRequest, ModelNotFound, Overloaded, RequestError
from services import errors
from services.codec import InvalidMessage
from services.errors import TABLE, classify

CODES = {
    "InvalidRequest": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "ModelNotFound": (grpc.StatusCode.NOT_FOUND, 404),
    "Overloaded": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "Unavailable": (grpc.StatusCode.UNAVAILABLE, 503),
    "DeadlineExceeded": (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    "SequenceFailed": (grpc.StatusCode.INTERNAL, 500),
}


async def failed_call(error: BaseException) -> grpc.aio.AioRpcError:
    """What a client sees of a handler that aborts with `error`, over a real socket."""

    async def handler(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await errors.abort(context, error)

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.T", {"M": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    call = channel.unary_unary("/t.T/M", None, None)(b"")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value
    finally:
        call.cancel()
        await channel.close(None)
        await server.stop(0)


def info_of(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    info = errors.error_info(error)
    assert info is not None
    return info


def test_every_request_error_has_its_row() -> None:
    subclasses = {cls.__name__: cls for cls in RequestError.__subclasses__()}
    assert set(subclasses) == set(CODES)
    for name, cls in subclasses.items():
        assert (TABLE[cls].code, TABLE[cls].http_status) == CODES[name]


def test_reasons_are_unique() -> None:
    reasons = [kind.reason for kind in TABLE.values()]
    assert len(set(reasons)) == len(reasons)


def test_a_subclass_takes_the_row_of_its_nearest_class() -> None:
    class Special(ModelNotFound):
        pass

    assert classify(Special("x")).reason == "MODEL_NOT_FOUND"
    assert classify(KeyError("x")).reason == "INTERNAL"


async def test_the_client_learns_reason_and_field() -> None:
    error = await failed_call(InvalidRequest("temperature", "temperature is -1, must be in [0, 100]"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert errors.describe(error) == "temperature is -1, must be in [0, 100]"
    info = info_of(error)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_REQUEST", "outrider", {"field": "temperature"})
    assert errors.retry_after(error) is None


async def test_a_broken_message_names_its_field_too() -> None:
    info = info_of(await failed_call(InvalidMessage("header.epoch", "is missing")))
    assert dict(info.metadata) == {"field": "header.epoch"}


async def test_an_overloaded_server_says_when_to_come_back() -> None:
    error = await failed_call(Overloaded("all 256 sequences are taken", retry_after=2.5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert errors.retry_after(error) == 2.5
    assert info_of(error).reason == "OVERLOADED"


async def test_an_unforeseen_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        error = await failed_call(ZeroDivisionError("secret detail\nof two lines"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert errors.describe(error) == "internal error; see the server's log"
    assert "secret detail" in caplog.text


async def test_a_message_of_many_lines_becomes_one() -> None:
    error = await failed_call(ModelNotFound("no model 'x'\n  served: a, b"))
    assert errors.describe(error) == "no model 'x' served: a, b"


async def test_a_connection_that_fails_is_described_in_one_line() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1", options=[("grpc.enable_http_proxy", 0)])
    call = channel.unary_unary("/t.T/M", None, None)(b"")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    finally:
        call.cancel()
        await channel.close(None)
    line = errors.describe(caught.value)
    assert line.startswith("unavailable: ")
    assert "\n" not in line
    assert errors.error_info(caught.value) is None
