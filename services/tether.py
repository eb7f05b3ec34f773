"""Runs one command that must not outlive its starter: `python tether.py FOLDER COMMAND...`.

The starter holds the write end of this process's stdin. However the starter ends, SIGKILL included, the pipe closes;
then the command is stopped and FOLDER removed. If this process itself is killed, Linux sends the command SIGTERM.
Runs as a script of its own, on the standard library alone: setting the parent-death signal needs code between fork and
exec, which is safe here, in a fresh process without threads, and would not be in a process that runs gRPC.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

STOP_SECONDS = 3.0
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


def stop(command: subprocess.Popen[bytes]) -> None:
    command.terminate()
    try:
        command.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        command.kill()


def stop_at_end_of_input(command: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    stop(command)


def main(folder: str, command_line: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = subprocess.Popen(command_line, stdin=subprocess.DEVNULL, preexec_fn=parent_death_signal())
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    threading.Thread(target=stop_at_end_of_input, args=(command,), daemon=True).start()
    status = command.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
