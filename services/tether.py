"""Keeps one command running that must not outlive its starter: `python tether.py FOLDER COMMAND...`.

The starter holds the write end of this process's stdin. However the starter ends, SIGKILL included, the pipe closes;
then the command is stopped and FOLDER removed. If this process itself is killed, Linux sends the command SIGTERM. A
command that ends by itself is started again, unless it had only just begun: then it cannot start at all.
Runs as a script of its own, on the standard library alone: setting the parent-death signal needs code between fork and
exec, which would not be safe in a process that runs gRPC.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

STOP_SECONDS = 3.0
STEADY_SECONDS = 1.0
"""A command that ends sooner than this failed to start."""
RESTART_SECONDS = 0.2
PR_SET_PDEATHSIG = 1


def parent_death_signal() -> Callable[[], None] | None:
    """What to run in the child before exec; None where the system has no such signal (macOS)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def set_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the signal was set
            os._exit(1)

    return set_signal


class Kept:
    """The command, and whether it is to stop."""

    def __init__(self, command_line: list[str]) -> None:
        self._command_line = command_line
        self._before_exec = parent_death_signal()
        self._stopping = threading.Event()
        self._command: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Until it is stopped, or cannot start. Returns the exit status of the last run."""
        while True:
            started = time.monotonic()
            self._command = subprocess.Popen(self._command_line, stdin=subprocess.DEVNULL, preexec_fn=self._before_exec)
            if self._stopping.is_set():
                self._command.terminate()
            status = self._command.wait()
            steady = time.monotonic() - started >= STEADY_SECONDS
            if not steady or self._stopping.wait(RESTART_SECONDS):
                return status if status >= 0 else 128 - status

    def request_stop(self) -> None:
        self._stopping.set()
        if self._command is not None:
            self._command.terminate()

    def stop_at_end_of_input(self) -> None:
        while os.read(0, 4096):
            pass
        self.request_stop()
        time.sleep(STOP_SECONDS)  # a daemon thread: it ends with the command
        if self._command is not None:
            self._command.kill()


def main(folder: str, command_line: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kept = Kept(command_line)
    signal.signal(signal.SIGTERM, lambda *_: kept.request_stop())
    threading.Thread(target=kept.stop_at_end_of_input, daemon=True).start()
    status = kept.run()
    shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
