"""`outrider up` from outside: what it starts serves, what it starts ends, and what cannot start says so in one line."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import psutil
import pytest
from openai import OpenAI

from tools.up import DRAFT, ROOT, TARGET, Up, environment, outrider
from tools.waiting import PATIENCE

IDLE = f"{sys.executable} -c 'input()' {{listen}}"
"""A worker that never serves, for starts that end before it matters."""


def listening(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def assert_gone(family: Sequence[psutil.Process], folder: Path, address: str) -> None:
    give_up = time.monotonic() + PATIENCE
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    for process in alive:
        process.kill()
    assert alive == []
    while folder.exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not folder.exists()
    assert not listening(address)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One deployment for all tests that leave it as it was."""
    logs = tmp_path_factory.mktemp("logs")
    with Up("--log-dir", str(logs), "--targets", "2") as running:
        running.wait_ready()
        yield running


def test_text_goes_to_stdout_and_figures_to_stderr(up: Up) -> None:
    result = outrider("generate", "w1 w2 w3", "--address", up.address, "--max-tokens", "12", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 12
    assert result.stdout.endswith("\n")
    assert "\x1b" not in result.stdout + result.stderr
    assert "12 tokens in" in result.stderr
    for word in ("tokens/s", "acceptance rate", "mean acceptance length", "mode", "seed"):
        assert word in result.stderr


def test_json_prints_one_object_alone(up: Up) -> None:
    arguments = ("generate", "w1 w2", "--address", up.address, "--max-tokens", "9", "--seed", "7", "--json")
    first, second = (outrider(*arguments, "--speculation", mode) for mode in ("on", "off"))
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    answer, plain = json.loads(first.stdout), json.loads(second.stdout)
    assert len(answer["token_ids"]) == 9
    assert (answer["seed"], answer["model"]) == (7, "table")
    assert answer["figures"]["completion_tokens"] == 9
    assert answer["figures"]["num_drafts"] > 0
    assert plain["figures"]["mode"] == "plain"
    assert plain["token_ids"] == answer["token_ids"]
    assert plain["text"] == answer["text"]


def test_compare_runs_both_and_prints_the_ratio(up: Up) -> None:
    result = outrider("generate", "w1 w2", "--address", up.address, "--max-tokens", "9", "--compare")
    assert result.returncode == 0, result.stderr
    speculative, plain = result.stdout.splitlines()
    assert speculative == plain
    assert "x the speed of plain decoding, the same tokens" in result.stderr


def test_the_prompt_can_come_from_standard_input(up: Up) -> None:
    command = [sys.executable, "-m", "services.cli.main", "generate", "-", "--address", up.address, "--max-tokens", "3"]
    result = subprocess.run(
        command, input="w1 w2", capture_output=True, text=True, cwd=ROOT, env=environment(), check=False, timeout=90
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 3


def on_a_terminal(*arguments: str, **more: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment(**more), close_fds=True
    )
    os.close(theirs)
    parts: list[bytes] = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:
        pass  # Linux says the end of a terminal with an error
    finally:
        os.close(ours)
        process.wait(30)
    return b"".join(parts).decode()


def test_colours_tell_where_tokens_came_from_on_a_terminal_only(up: Up) -> None:
    arguments = ("generate", "w1 w2", "--address", up.address, "--max-tokens", "40", "--speculation", "on")
    shown = on_a_terminal(*arguments)
    legend, text = shown.split("\n", 1)
    for colour, meaning in (("32", "accepted"), ("33", "correction or bonus"), ("36", "plain")):
        assert f"\x1b[{colour}m■ {meaning}" in legend
    assert "\x1b[32m" in text
    assert "\x1b[33m" in text
    assert "\x1b[" not in on_a_terminal(*arguments, NO_COLOR="1")


def test_what_the_server_refuses_is_wrong_use(up: Up) -> None:
    cases = [
        ((" ".join(["w1"] * 600),), "the prompt has 600 tokens, the context of table is 512 tokens"),
        (("w1", "--model", "other"), "table"),
        (("w1", "--chat"), "no chat template"),
    ]
    for arguments, words in cases:
        result = outrider("generate", *arguments, "--address", up.address)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_status_shows_workers_with_leases_and_load(up: Up) -> None:
    result = outrider("status", "--address", up.address, "--wait", "5", "--json")
    assert result.returncode == 0, result.stderr
    status = json.loads(result.stdout)
    assert status["ready"] is True
    assert sorted((worker["identity"]["role"], worker["state"]) for worker in status["workers"]) == [
        ("draft", "ready"),
        ("target", "ready"),
        ("target", "ready"),
    ]
    table = outrider("status", "--address", up.address)
    assert table.returncode == 0
    assert table.stdout.count("ready") == 3
    assert "redis connected" in table.stderr


def test_the_official_client_takes_the_printed_base_url(up: Up) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", up.base_url)
    with (
        httpx2.Client(trust_env=False) as connections,
        OpenAI(base_url=up.base_url, api_key="any", http_client=connections, max_retries=0) as client,
    ):
        answer = client.completions.create(model="", prompt="w1 w2 w3", max_tokens=8)
    assert len(answer.choices[0].text.split()) == 8


def test_an_interrupted_generate_ends_with_130(up: Up) -> None:
    command = [sys.executable, "-m", "services.cli.main", "generate", "w1", "--address", up.address]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode in (130, 0), errors  # 0 if the whole answer had arrived
    assert "Traceback" not in errors


def test_a_killed_worker_starts_again(up: Up) -> None:
    up.worker("draft-1").kill()
    up.wait_for(r"^\[draft-1\] .* ended with signal SIGKILL; starts again in 0.5 s$")
    up.wait_for(r"^\[draft-1\] ready unix:")
    assert outrider("generate", "w1", "--address", up.address, "--max-tokens", "3").returncode == 0


def test_ctrl_c_ends_everything_and_leaves_log_files(tmp_path: Path) -> None:
    with Up("--log-dir", str(tmp_path)) as up:
        address = up.wait_ready()
        family, folder = up.family(), up.folder()
        up.interrupt()
        assert up.end() == 0
    assert_gone(family, folder, address)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "draft-1.log",
        "scheduler.log",
        "target-1.log",
        "up.log",
    ]


def test_nothing_is_left_of_a_killed_launcher() -> None:
    with Up() as up:
        address = up.wait_ready()
        family, folder = up.family(), up.folder()
        assert any("redis" in process.name() for process in family)
        up.process.kill()
        up.end()
        assert_gone(family, folder, address)


def test_the_first_ctrl_c_drains_and_the_second_ends_at_once() -> None:
    with Up(target=f"{TARGET} --delay 0.2", draft=f"{DRAFT} --delay 0.2") as up:
        address = up.wait_ready()
        family, folder = up.family(), up.folder()
        command = [sys.executable, "-m", "services.cli.main", "generate", "w1", "--address", address]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment()
        ) as asking:
            assert asking.stdout is not None
            assert asking.stdout.read(1)
            up.interrupt()
            up.wait_for("draining 1 sequences")
            assert up.process.poll() is None
            up.interrupt()
            assert up.end() == 130
            assert asking.wait(PATIENCE) != 0, "its answer came to its end, which takes 20 s"
    assert_gone(family, folder, address)


def test_a_draft_worker_that_fits_no_target_ends_the_start() -> None:
    with Up(draft=f"{DRAFT} --vocabulary-size 60") as up:
        assert up.end() == 1
    assert up.lines[-1].startswith("error: draft-1 was refused: ")
    assert "table-draft (60 token ids)" in up.lines[-1]
    assert "table (64 token ids)" in up.lines[-1]


def test_a_worker_that_cannot_start_ends_the_start_with_its_line() -> None:
    complain = f"""{sys.executable} -c 'print("error: no such thing as {{listen}}"); raise SystemExit(1)'"""
    with Up(target=complain) as up:
        assert up.end() == 1
    assert up.lines[-1].startswith("error: no such thing as unix:/")


def test_a_start_that_takes_long_says_what_is_waited_for() -> None:
    with Up(target=f"{sys.executable} -c 'import time; time.sleep(90)' {{listen}}") as up:
        line = up.wait_for(
            r"\[up\] .*after (\S+) s not ready yet: .*target-1; a model's first load on a machine compiles"
        )
        assert 5.0 <= float(line[1]) < 90.0
        up.interrupt()
        assert up.end() == 0


def test_an_unreachable_redis_ends_the_start() -> None:
    with Up("--redis-url", "redis://127.0.0.1:1", target=IDLE, draft=IDLE) as up:
        assert up.end() == 1
    assert up.lines[-1].startswith("error: cannot reach Redis at redis://127.0.0.1:1")
    assert "redis_url" in up.lines[-1]
