"""A folder whose name leaves room for that of a Unix socket: pytest's own are too long on some machines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="outrider-test-", dir="/tmp") as name:
        yield Path(name)
