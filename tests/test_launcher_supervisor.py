"""The supervisor's promises, with small real processes: restart, refusal at start, ordered end, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from services.child import ChildSpec
from services.deployment import Api
from services.launcher import free_port
from services.output import Output
from services.start_error import StartError
from services.supervisor import ChildFailed, Supervisor
from tools import waiting

SLEEPER = "import signal, sys; print('here', flush=True); signal.pause()"
DEADLINE = waiting.PATIENCE


def python(name: str, code: str, **environment: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", code), {**os.environ, **environment})


class Lines:
    """What children print and what the supervisor says, as it comes."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}
        self.said: dict[str, list[str]] = {}

    def line(self, name: str, line: str) -> None:
        self.of.setdefault(name, []).append(line)

    def say(self, name: str, message: str) -> None:
        self.said.setdefault(name, []).append(message)


async def until(condition: Callable[[], object]) -> None:
    await waiting.until(lambda: bool(condition()), "what the test waits for", patience=DEADLINE)


def ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("ignored signals are read from /proc")
    ignored = next(line for line in status.read_text().splitlines() if line.startswith("SigIgn")).split()[1]
    return bool(int(ignored, 16) & (1 << (number - 1)))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def supervisor(tmp_path: Path, lines: Lines) -> AsyncIterator[Supervisor]:
    (tmp_path / "private").mkdir()
    supervisor = Supervisor(tmp_path / "private", lines.line, lines.say)
    yield supervisor
    supervisor.close()


async def test_a_dead_child_is_started_again_and_that_is_said(supervisor: Supervisor, lines: Lines) -> None:
    supervisor.start([python("target-1", SLEEPER)])
    supervisor.settle()
    await until(lambda: lines.of.get("target-1") == ["here"])
    first = supervisor.pids["target-1"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: lines.of["target-1"] == ["here", "here"])
    assert supervisor.pids["target-1"] != first
    assert lines.said["target-1"] == ["ended with signal SIGKILL; starts again in 0.5 s"]


async def test_a_child_that_keeps_dying_waits_longer_each_time(supervisor: Supervisor, lines: Lines) -> None:
    supervisor.settle()
    supervisor.start([python("draft-1", "raise SystemExit(1)")])
    await until(lambda: len(lines.said.get("draft-1", ())) == 2)
    assert [line.split()[-2] for line in lines.said["draft-1"]] == ["0.5", "1"]


async def test_a_child_that_cannot_start_as_configured_fails_the_start(supervisor: Supervisor) -> None:
    supervisor.start([python("target-1", "print('info'); print('error: no such model'); raise SystemExit(2)")])
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(ChildFailed) as caught:
            await supervisor.failure
    assert (caught.value.name, caught.value.code, caught.value.complaint) == ("target-1", 2, "no such model")


async def test_a_command_that_does_not_exist_fails_the_start(supervisor: Supervisor) -> None:
    supervisor.start([ChildSpec("target-1", ("/nowhere/at-all",), os.environ)])
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(ChildFailed, match="cannot run /nowhere/at-all: No such file"):
            await supervisor.failure


async def test_children_end_in_order_and_the_stubborn_are_killed(supervisor: Supervisor, lines: Lines) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
    told = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit(0)))\n"
        "print('here', flush=True)\nsignal.pause()"
    )
    supervisor.start([python("scheduler", stubborn), python("target-1", told)])
    await until(lambda: len(lines.of) == 2)
    scheduler = psutil.Process(supervisor.pids["scheduler"])
    stopping = asyncio.create_task(supervisor.stop([(("scheduler",), 0.3), (("target-1",), DEADLINE)]))
    await until(lambda: not scheduler.is_running() or lines.of["target-1"] != ["here"])
    assert not scheduler.is_running(), "the worker was told before the scheduler had ended"
    await stopping
    assert lines.of["target-1"] == ["here", "told"]
    assert supervisor.pids == {}
    assert lines.said == {}


async def test_children_ignore_sigint(supervisor: Supervisor, lines: Lines) -> None:
    supervisor.start([python("target-1", "import sys; print('here', flush=True)\nfor line in sys.stdin: pass")])
    await until(lambda: lines.of.get("target-1") == ["here"])
    child = supervisor.pids["target-1"]
    assert os.getpgid(child) != os.getpgid(0), "a terminal would send it Ctrl-C"
    assert ignores(child, signal.SIGINT)


async def test_the_folder_is_gone_at_the_end(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.close()
    assert not (tmp_path / "private").exists()


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from services.child import ChildSpec
from services.supervisor import Supervisor

GRANDPARENT = '''
import os, signal, socket, subprocess, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
signal.pause()
'''

async def main():
    folder = Path(sys.argv[1])
    supervisor = Supervisor(folder, lambda name, line: print(line, flush=True), lambda *_: None)
    command = (sys.executable, "-I", "-S", "-c", GRANDPARENT, str(folder / "target.sock"))
    supervisor.start([ChildSpec("target-1", command, os.environ)])
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    try:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert (folder / "target.sock").exists()
        left = [*(psutil.Process(pid) for pid in pids), *psutil.Process(launcher.pid).children()]
    finally:
        launcher.kill()
        launcher.communicate()
    _, alive = psutil.wait_procs(left, timeout=DEADLINE)
    for process in alive:
        process.kill()
    assert alive == []
    give_up = time.monotonic() + DEADLINE
    while folder.exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not folder.exists()


def test_a_taken_port_is_one_line_with_port_and_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"^port {port} on 127.0.0.1 is taken .*--grpc-port$"):
            free_port("127.0.0.1", port, Api.GRPC)
    assert free_port("127.0.0.1", port, Api.GRPC) == port
    assert free_port("127.0.0.1", 0, Api.HTTP) > 0


def test_lines_carry_the_role_and_files_are_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.logs.FILE_BYTES", 2000)
    output = Output(tmp_path / "logs")
    for number in range(1000):
        output.line("target-1", f"line {number} 100%")
    output.line("draft-1", "other")
    output.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0] == "[target-1] line 0 100%"
    assert "[draft-1] other" in printed.err
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["draft-1.log", "target-1.log", "target-1.log.1", "target-1.log.2"]
    assert all(path.stat().st_size <= 2000 for path in (tmp_path / "logs").iterdir())
    assert (tmp_path / "logs" / "target-1.log").read_text().endswith("line 999 100%\n")
