"""Turns on the cores: one forward at a time, a dead holder frees the lock, a frozen one holds nobody up for long."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.turns import CpuTurn, TakingTurns
from specdec.engine.model import LanguageModel, Segment
from specdec.log import Log
from tools.table_model import TableModel

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom services.turns import CpuTurn\n"
    "with CpuTurn(Path(sys.argv[1]), 2.0).held() as owns:\n"
    "    print(owns, flush=True)\n    time.sleep(60)"
)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "cpu.lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def turn(lock: Path) -> Iterator[CpuTurn]:
    turn = CpuTurn(lock, patience=2.0)
    yield turn
    turn.close()


def test_two_processes_never_run_at_once(lock: Path) -> None:
    """Each appends a start and an end; a start within another's turn would show as two starts in a row."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom services.turns import CpuTurn\n"
        "turn = CpuTurn(Path(sys.argv[1]), 1000.0)\nturn.usual_seconds = 1.0\n"
        "with open(sys.argv[2], 'a', buffering=1) as log:\n"
        "    for _ in range(50):\n        with turn.held():\n"
        "            log.write('start\\n')\n            time.sleep(0.002)\n            log.write('end\\n')\n"
    )
    record = lock.with_name("record")
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(lock), str(record)], cwd=Path(__file__).parent.parent)
        for _ in range(2)
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert record.read_text().split() == ["start", "end"] * 100


def test_a_killed_holder_frees_the_lock(turn: CpuTurn, holder: subprocess.Popen[str]) -> None:
    turn.usual_seconds = 60.0
    threading.Timer(0.1, holder.kill).start()
    with turn.held() as owns:
        assert owns


def test_a_frozen_holder_is_waited_for_twice_the_usual_forward(turn: CpuTurn, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    turn.usual_seconds = 0.1
    start = time.monotonic()
    with turn.held() as owns:
        waited = time.monotonic() - start
        assert not owns
    assert waited >= 0.2
    assert turn.waits_given_up == 1
    assert turn.usual_seconds == 0.1, "a forward beside another one says nothing of the usual one"


def test_the_usual_forward_is_learnt_from_turns(turn: CpuTurn) -> None:
    with turn.held():
        time.sleep(0.02)
    assert turn.usual_seconds is not None
    assert turn.usual_seconds >= 0.02
    assert turn.longest_wait == 2.0 * turn.usual_seconds


def test_a_forward_holds_the_lock_and_frees_it_even_when_it_fails(lock: Path, turn: CpuTurn) -> None:
    seen: list[bool] = []
    other = CpuTurn(lock, patience=0.0)
    other.usual_seconds = 0.0

    class Watched(TableModel):
        def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
            with other.held() as owns:
                seen.append(owns)
            raise RuntimeError("broken")

    model = TakingTurns(Watched(), turn)
    with pytest.raises(RuntimeError, match="broken"):
        model.forward([])
    assert seen == [False]
    with other.held() as owns:
        assert owns
    other.close()


def test_a_model_that_takes_turns_is_the_same_model(turn: CpuTurn) -> None:
    plain = TableModel()
    wrapped = TakingTurns(TableModel(), turn)
    answers = []
    both: list[LanguageModel] = [plain, wrapped]
    for model in both:
        model.open("s", Log(bytes(16), [1, 2, 3]))
        model.reserve("s", 3)
        answers.append(model.forward([Segment("s", (1, 2, 3))])[0])
        model.keep("s", [0, 1])
        assert model.kv_length("s") == 2
        model.truncate("s", 1)
        assert model.kv_length("s") == 1
        assert model.blocks_used > 0
        model.release("s")
        assert model.blocks_used == 0
    assert answers[0].equal(answers[1])
    for name in ("name", "vocabulary_size", "context_length", "device", "dtype", "blocks_total"):
        assert getattr(plain, name) == getattr(wrapped, name)


def test_workers_of_one_lock_name_it_alike_and_others_do_not(tmp_path: Path) -> None:
    turns = [CpuTurn(tmp_path / name, patience=1.0) for name in ("a", "a", "b")]
    try:
        first, second, other = (turn.name for turn in turns)
    finally:
        for turn in turns:
            turn.close()
    assert first == second != other
