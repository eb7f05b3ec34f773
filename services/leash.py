"""Becomes a command that dies with its launcher: `python leash.py LAUNCHER_PID COMMAND...`.

Runs as a script of its own on the standard library: it asks Linux for SIGKILL when the launcher is gone, ignores the
SIGINT that a terminal sends to everyone, and then turns into the command, which inherits both. (Elsewhere
`services/guard.py` does the killing alone.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
COMMAND_NOT_FOUND = 127


def main(launcher_pid: int, command: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before the signal was asked for
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(COMMAND_NOT_FOUND)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
