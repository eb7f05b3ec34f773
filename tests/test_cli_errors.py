"""What a user reads who did something wrong: one line on stderr with the cure, and the exit code that was promised."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def outrider(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        env={**ours, **environment},
        check=False,
    )


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", ""], 2, "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature is -1, must be in [0, 100]"),
        (["generate", "x", "--top-p", "0"], 2, "top_p is 0, must be in (0, 1]"),
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens is 0, must be 1 or more"),
        (["generate", "x", "--draft-length", "0"], 2, "--speculation off"),
        (["generate", "x", "--timeout", "0"], 2, "timeout is 0"),
        (["generate", "x", "--speculation", "maybe"], 2, "'maybe' is not one of"),
        (["generate"], 2, "Missing argument"),
        (["gemerate", "x"], 2, "Did you mean 'generate'"),
        (["target", "--nonsense"], 2, "--nonsense"),
        (["target", "--token-budget", "0"], 2, "token_budget is '0' (flag --token-budget)"),
        (["target", "--model", "nobody"], 1, "no such folder, no such named source"),
        (["target", "--listen", "0.0.0.0:0"], 2, "--allow-unauthenticated"),
        (["draft", "--drafter", "model"], 2, "--model"),
        (["draft", "--ngram-min", "9", "--ngram-max", "3"], 2, "ngram_min is 9"),
        (["scheduler", "--grpc-host", "0.0.0.0"], 2, "--allow-unauthenticated"),
        (
            ["up", "--model", "nobody", "--grpc-port", "0", "--http-port", "0"],
            1,
            "no such folder, no such named source",
        ),
        (["up", "--drafter", "model", "--grpc-port", "0", "--http-port", "0"], 2, "--draft-model"),
        (["up", "--config", "/nowhere.yaml"], 2, "cannot read settings file"),
        (["models", "fetch", "nobody"], 1, "no named source 'nobody'"),
        (["config", "show", "nobody"], 2, "no role 'nobody'"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], code: int, words: str) -> None:
    result = outrider(*arguments)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["status", "--wait", "0.1"]])
def test_no_server_is_one_line(command: list[str]) -> None:
    address = free_address()
    result = outrider(*command, "--address", address)
    assert result.returncode == 1
    assert result.stderr == f"error: no server at {address}: start one with `outrider up`\n"
    assert result.stdout == ""


@pytest.mark.parametrize(("flag", "other"), [("--grpc-port", "--http-port"), ("--http-port", "--grpc-port")])
def test_a_taken_port_ends_the_start_with_port_and_flag(flag: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = outrider("up", flag, str(port), other, "0")
    assert result.returncode == 1
    assert re.fullmatch(f"error: port {port} on 127.0.0.1 is taken .*{flag}\n", result.stderr)


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("target: {treads: 1}")
    result = outrider("config", "show", "--config", str(path))
    assert result.returncode == 2
    assert "unknown setting 'treads' in section 'target'" in result.stderr


def test_config_show_names_sources_and_masks_secrets(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("scheduler: {secret: hush, width: 3}")
    result = outrider("config", "show", "scheduler", OUTRIDER_CONFIG=str(path), OUTRIDER_DRAFT_LENGTH="7")
    assert result.returncode == 0, result.stderr
    assert "hush" not in result.stdout
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if len(line.split()) > 2}
    assert rows["secret"].split() == ["********", "file", str(path)]
    assert rows["width"].split() == ["3", "file", str(path)]
    assert rows["draft_length"].split() == ["7", "environment", "OUTRIDER_DRAFT_LENGTH"]
    assert rows["policy"].split() == ["goodput", "default"]


def test_version_names_package_protocol_torch_and_devices() -> None:
    result = outrider("--version")
    assert result.returncode == 0
    words = [line.split(maxsplit=1)[0] for line in result.stdout.splitlines()]
    assert words == ["outrider", "protocol", "python", "torch", "transformers", "grpcio", "devices"]


LOADED = "import json, sys; sys.argv[1:] = json.loads(sys.argv[1])\n" + (
    "from services.cli.main import run\n"
    "run(sys.argv[1:])\n"
    "print(json.dumps([m for m in ('torch', 'transformers', 'numpy', 'grpc') if m in sys.modules]), file=sys.stderr)"
)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], []),
        (["--version"], []),
        (["up", "--help"], ["grpc"]),
        (["target", "--help"], []),
        (["draft", "--help"], []),
        (["scheduler", "--help"], []),
        (["generate", "--help"], ["grpc"]),
        (["config", "show"], []),
    ],
)
def test_help_loads_no_torch(arguments: list[str], allowed: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(arguments)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert set(json.loads(result.stderr.splitlines()[-1])) <= set(allowed)
    assert result.stdout


def test_help_answers_within_half_a_second() -> None:
    """Of processor time, which other processes hardly lengthen; the best of a few."""

    def seconds() -> float:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "--help"], stdout=subprocess.DEVNULL, cwd=ROOT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert any(seconds() < 0.5 for _ in range(5))


def test_the_ngram_draft_worker_imports_no_torch() -> None:
    code = (
        "import sys\nfrom services.settings import DraftSettings, load\n"
        "import services.draft_process as process\n"
        "import draft_worker.worker, services.worker_lease, services.worker_process\n"
        "process.build_ngram(load(DraftSettings).settings)\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
