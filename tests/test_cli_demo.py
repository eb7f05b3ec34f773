"""`outrider demo`, which is `make run`: a real model answers on a terminal, and the figures are worth showing."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools.up import ROOT, environment

SECONDS = 100
ACCEPTED, CORRECTED, PLAIN = (f"\x1b[{colour}m" for colour in ("32", "33", "36"))


@pytest.fixture
def shown(smollm2: Path) -> str:
    """All that a terminal sees of one run."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "services.cli.main", "demo"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment())
    os.close(theirs)
    parts: list[bytes] = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:
        pass  # Linux says the end of a terminal with an error
    finally:
        os.close(ours)
    assert process.wait(SECONDS) == 0
    assert psutil.Process().children(recursive=True) == []
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_the_demonstration_shows_speculation_at_work(shown: str) -> None:
    assert "Traceback" not in shown
    assert "chosen because this drafter copies" in shown
    assert "Copy this text" in shown
    for meaning in ("accepted from the draft", "correction or bonus", "plain, without a draft"):
        assert meaning in shown
    text = shown.split("plain, without a draft\x1b[0m\n\n")[1].split("\n\n")[0]
    assert all(colour in text for colour in (ACCEPTED, CORRECTED, PLAIN))
    figures = re.search(r"(\d+) tokens in .* ([\d.]+) tokens/s, acceptance rate (\d+)%, .*", shown)
    length = re.search(r"mean acceptance length ([\d.]+), mode (\w+)", shown)
    assert figures
    assert length
    assert int(figures[1]) >= 20
    assert float(length[1]) >= 2
    assert shown.rstrip().splitlines()[-1].startswith("next: make run PAIR=qwen-coder")
