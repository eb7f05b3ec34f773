"""A request's body, read within limits and turned into a checked model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from services.http.errors import HttpError, bad_request

Body = TypeVar("Body", bound=BaseModel)

EXTRA = "extra_forbidden"


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """Raises HttpError: 413 too large, 415 not JSON by its own account, 400 for all that is wrong inside."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HttpError(415, f"content-type is {content_type or 'absent'}, must be application/json")
    content = await _read(request, max_bytes)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise _refusal(error, content) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(content)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is too large, must have at most {max_bytes} bytes", code="request_too_large")


def _refusal(error: ValidationError, content: bytes) -> HttpError:
    """The first complaint, with the path to the field as JSON users write it."""
    complaints = error.errors(include_url=False, include_context=False)
    # Of the branches of a union, the one that got furthest tells what was meant.
    first = max(complaints, key=lambda complaint: len(complaint["loc"]) if len(complaints) > 1 else 0)
    if first["type"] == "json_invalid":
        return HttpError(400, f"the body is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = _path(first["loc"], json.loads(content))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == EXTRA:
        return bad_request(param, f"{param}: this field is not supported here")
    if first["type"] == "missing":
        return bad_request(param, f"{param}: this field is required")
    return bad_request(param, f"{param}: {message[:1].lower() + message[1:]}" if param else message)


def _path(location: Sequence[int | str], value: Any) -> str:
    """`messages[0].content`: the steps that exist in the body. pydantic's location also names branches of unions."""
    path = ""
    for step in location:
        if isinstance(value, dict) and isinstance(step, str) and step in value:
            value, path = value[step], f"{path}.{step}" if path else step
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value, path = value[step], f"{path}[{step}]"
        elif isinstance(value, dict) and step == location[-1] and isinstance(step, str):
            path = f"{path}.{step}" if path else step
    return path
