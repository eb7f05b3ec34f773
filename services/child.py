"""One supervised process: its command, its output, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LEASH = Path(__file__).with_name("leash.py")
MAX_LINE = 16 * 1024
"""Longer lines of a child are split."""
KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """name: role and number, e.g. "target-1". environment: all of it, not in addition to ours."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


class Child:
    """A running process. Callbacks come from threads of its own."""

    def __init__(
        self, spec: ChildSpec, on_line: Callable[[str, str], None], on_exit: Callable[[Child, int], None]
    ) -> None:
        """Starts it, in a process group of its own. on_line(name, line); on_exit(child, return code) comes after all
        lines that it wrote itself. Raises OSError."""
        self.spec = spec
        self.started = time.monotonic()
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._on_line, self._on_exit = on_line, on_exit
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *spec.command),
            stdin=subprocess.PIPE,  # never written to; it ends when we do, for commands that watch it
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(spec.environment),
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name=f"{spec.name}-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name=f"{spec.name}-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def complaint(self) -> str:
        """Its last `error:` line without the prefix, else its last line."""
        errors = [line for line in self.last_lines if line.startswith("error: ")]
        lines = errors or [line for line in self.last_lines if line.strip()]
        return lines[-1].removeprefix("error: ") if lines else ""

    def signal(self, number: signal.Signals) -> None:
        """To the process itself for SIGTERM, which it passes on as it sees fit; to its whole group for SIGKILL."""
        try:
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            elif self.running:
                self._process.send_signal(number)
        except (ProcessLookupError, PermissionError):
            pass  # it has just ended

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        for raw in iter(lambda: stream.readline(MAX_LINE), b""):
            line = raw.decode(errors="replace").rstrip("\r\n")
            self.last_lines.append(line)
            self._on_line(self.spec.name, line)
        stream.close()

    def _wait(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._reader.join(timeout=0.5)  # a grandchild may hold the pipe open for longer
        self._on_exit(self, code)
