"""Where the lines of a deployment go: to stderr with the role in front, and to one bounded file per role."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from services.logs import bounded_file, role_prefix, use_colours

LAUNCHER = "up"


class Output:
    """Thread-safe. A line is never mixed with another one."""

    def __init__(self, log_dir: Path | None = None, stream: TextIO | None = None, as_json: bool = False) -> None:
        """as_json: lines tell their role themselves, those of the processes too."""
        self._as_json = as_json
        self._stream = stream or sys.stderr
        self._colours = use_colours(self._stream)
        self._log_dir = log_dir
        self._files: dict[str, logging.handlers.RotatingFileHandler] = {}
        self._lock = threading.Lock()

    def line(self, name: str, line: str) -> None:
        """A line as process `name` wrote it."""
        with self._lock:
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone; the files can still be read
                prefix = "" if self._as_json else role_prefix(name, self._colours)
                print(prefix + line, file=self._stream, flush=True)
            if self._log_dir is not None:
                self._file(self._log_dir, name).emit(logging.makeLogRecord({"msg": line}))

    def say(self, name: str, message: str) -> None:
        """A line of the launcher's own about process `name`."""
        if self._as_json:
            now = datetime.now(UTC).isoformat()
            told = {"timestamp": now, "level": "info", "event": message, "role": LAUNCHER, "of": name}
            self.line(name, json.dumps(told))
        else:
            self.line(name, f"{time.strftime('%H:%M:%S')} {message}")

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._log_dir = None

    def _file(self, folder: Path, name: str) -> logging.handlers.RotatingFileHandler:
        if name not in self._files:
            self._files[name] = bounded_file(folder, name)
        return self._files[name]
