"""Cleans up behind a launcher that was killed: `python guard.py FOLDER`.

The launcher holds the write end of this process's stdin and tells there which process groups it starts (`+PGID`) and
sees end (`-PGID`). When the pipe closes, however that came about, the groups that are left are killed and FOLDER, with
its sockets and private settings, is removed. Runs as a script of its own on the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def read_groups() -> set[int]:
    """Process groups that still run when stdin ends."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in read_groups():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
