"""What a process of ours would write to stderr, in a test."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from services import logs


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


@contextmanager
def logged(monkeypatch: pytest.MonkeyPatch, written: io.StringIO | None = None) -> Iterator[io.StringIO]:
    """`services.logs` writes there meanwhile; afterwards logging is as it was."""
    written = written or io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = []
    # Not sys.stderr itself, which pytest exchanges too.
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=written))
    monkeypatch.delenv(logs.LAUNCHED_VARIABLE, raising=False)
    try:
        yield written
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
        root.setLevel(level)
        structlog.reset_defaults()
