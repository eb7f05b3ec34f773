"""Kinds of value that settings share: sizes in bytes, addresses, comma-separated lists."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path that the kernel takes."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")


def parse_size(value: object) -> object:
    """Bytes of "2GiB", "512 MB" or a plain number. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    factor = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError("must be a size such as 2GiB, 512MiB or a number of bytes")
    return int(float(match.group(1)) * factor)


def parse_address(value: object) -> object:
    """`HOST:PORT` or `unix:/path`. Raises ValueError."""
    if not isinstance(value, str):
        return value
    if value.startswith("unix:"):
        length = len(value.removeprefix("unix:").encode())
        if not 0 < length <= MAX_SOCKET_PATH:
            raise ValueError(f"the socket's path has {length} bytes, must have 1 to {MAX_SOCKET_PATH}")
        return value
    match = _HOST_PORT.fullmatch(value)
    if match is None or int(match.group(2)) > 65535:
        raise ValueError("must be HOST:PORT with a port in [0, 65535], or unix:/path")
    return value


def split_list(value: object) -> object:
    """A list from "a,b" (environment), from ["a,b", "c"] (repeated flags) or from a list."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(part.strip() for item in parts for part in str(item).split(",") if part.strip())


Size = Annotated[int, BeforeValidator(parse_size)]
Address = Annotated[str, BeforeValidator(parse_address)]
AddressList = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_list)]
TextList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
