"""`outrider up` as a process of a test, with table models in place of real ones."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

from tools.process import SECRET
from tools.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TARGET = f"{sys.executable} -m tools.table_target --listen {{listen}}"
DRAFT = f"{sys.executable} -m tools.table_draft --listen {{listen}}"


def environment(**more: str) -> dict[str, str]:
    """Ours without settings of ours, with the test tools importable."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**ours, "PYTHONPATH": path, "OUTRIDER_SECRET": SECRET.decode(), **more}


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
        env=environment(),
        check=False,
    )


class Up:
    """Context manager; kills what is left at its end. target, draft "": the real workers. patience: seconds to wait for
    a line."""

    def __init__(
        self, *arguments: str, target: str = TARGET, draft: str = DRAFT, patience: float = PATIENCE, **more: str
    ) -> None:
        self._patience = patience
        command = ["up", "--grpc-port", "0", "--http-port", "0"]
        command += ["--target-command", target] if target else []
        command += ["--draft-command", draft] if draft else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", *command, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(**more),
        )
        self.lines: list[str] = []
        self.address = ""
        self.base_url = ""
        self.ready_after = 0.0
        self._started = time.monotonic()
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Up:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()

    def wait_ready(self) -> str:
        """The address of the gateway; that of its HTTP API is `base_url`, and `ready_after` the seconds it took."""
        self.base_url = self.wait_for(r"\[up\] .* OpenAI API at (\S+)")[1]
        line = self.wait_for(r"\[up\] .* ready at (\S+)")
        self.address = line[1]
        self.ready_after = time.monotonic() - self._started
        return self.address

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line, not looked at so far, that matches. Raises TimeoutError with all lines."""
        give_up = time.monotonic() + self._patience
        while True:
            try:
                line = self._new.get(timeout=max(give_up - time.monotonic(), 0.001))
            except queue.Empty:
                line = None
            if line is None:
                raise TimeoutError(f"no line matches {pattern!r} in:\n" + "\n".join(self.lines))
            if match := re.search(pattern, line):
                return match

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Waits for the exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def family(self) -> list[psutil.Process]:
        """Every process that it started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, found by its private socket."""
        return next(process for process in self.family() if any(f"{name}.sock" in word for word in process.cmdline()))

    def folder(self) -> Path:
        """The private folder of sockets and settings."""
        words = [word for process in self.family() for word in process.cmdline()]
        return next(Path(word.removeprefix("unix:")).parent for word in words if word.endswith("target-1.sock"))

    def _read(self) -> None:
        if self.process.stderr is None:
            return
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))
                self._new.put(self.lines[-1])
        self._new.put(None)
