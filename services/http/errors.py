"""What went wrong, as an OpenAI error body: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import http
import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from scheduler.errors import InvalidRequest, Overloaded
from services.codec import InvalidMessage
from services.errors import ErrorKind, classify, public_message
from specdec.log_extra import PRIVATE

log = logging.getLogger(__name__)

CODES = {"INVALID_REQUEST": None, "INVALID_MESSAGE": None, "UNAUTHENTICATED": "invalid_api_key"}
"""Where ours is not the reason in small letters."""


class HttpError(Exception):
    """Refused before the gateway sees it. The message is fit for the caller. param: the field to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def bad_request(param: str, message: str) -> HttpError:
    return HttpError(400, message, param)


def error_body(error: BaseException, names: dict[str, str] | None = None) -> dict[str, Any]:
    """names: what a field of the gateway is called in this API, where it differs."""
    if isinstance(error, HttpError):
        return _body(str(error), _type(error.status), error.param, error.code)
    kind, message = classify(error), public_message(error)
    param = error.field if isinstance(error, (InvalidRequest, InvalidMessage)) else None
    for ours, theirs in (names or {}).items():
        if message.startswith(ours) and param == ours:
            message = theirs + message.removeprefix(ours)
        message = message.replace(f" with a {ours}:", f" with {theirs}:")  # two fields that clash
    param = (names or {}).get(param, param) if param is not None else None
    return _body(message, _type(kind.http_status), param or _param_of(kind), _code(kind))


def error_response(error: BaseException, names: dict[str, str] | None = None) -> JSONResponse:
    """What the caller may not see is logged here."""
    if isinstance(error, HttpError):
        status, headers = error.status, {}
    else:
        kind = classify(error)
        status, headers = kind.http_status, _headers(error, kind)
        log_private(error)
    return JSONResponse(error_body(error, names), status, headers)


def log_private(error: BaseException) -> None:
    if not isinstance(error, HttpError) and not classify(error).public:
        log.error("request failed", exc_info=error, extra={PRIVATE: True})


async def on_error(request: Request, error: Exception) -> Response:
    """For everything that a route raises."""
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """For what the framework itself refuses: unknown routes and methods."""
    status, headers, detail = 500, None, ""
    if isinstance(error, HTTPException):
        status, headers, detail = error.status_code, error.headers, error.detail
    if status == http.HTTPStatus.NOT_FOUND:
        detail = f"there is no {request.url.path}; see /openapi.json for what there is"
    elif status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (headers or {}).get("allow") or (headers or {}).get("Allow") or "another method"
        detail = f"{request.url.path} does not take {request.method}: use {allowed}"
    code = "not_found" if status == http.HTTPStatus.NOT_FOUND else None
    return JSONResponse(_body(detail, _type(status), None, code), status, headers)


def _headers(error: BaseException, kind: ErrorKind) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if kind.http_status == http.HTTPStatus.UNAUTHORIZED:
        return {"www-authenticate": "Bearer"}
    return {"retry-after": "1"} if kind.http_status == http.HTTPStatus.SERVICE_UNAVAILABLE else {}


def _type(status: int) -> str:
    if status == http.HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _code(kind: ErrorKind) -> str | None:
    return CODES.get(kind.reason, kind.reason.lower())


def _param_of(kind: ErrorKind) -> str | None:
    return "model" if kind.reason == "MODEL_NOT_FOUND" else None


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
