"""The curl examples of the README and of docs/examples run as they are."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tools.http_system import structured_system
from tools.scripted import oracle

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
README = (EXAMPLES.parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```\w*\n(curl .*?)^```", README, re.MULTILINE | re.DOTALL)
DEFAULT_URL = "http://127.0.0.1:8000"


async def run(name: str, command: list[str], url: str) -> str:
    """What it prints. Fails as the command does."""
    environment = {**os.environ, "OUTRIDER_URL": url, "no_proxy": "*", "NO_PROXY": "*"}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, f"{name}: {out.decode()} {err.decode()}"
    return out.decode()


def check(name: str, printed: str) -> None:
    """Beyond that the server took it."""
    if name == "stream":
        assert printed.count("data: [DONE]") == 1
        return
    answers: list[Any] = []
    while printed:
        answer, end = json.JSONDecoder().raw_decode(printed)
        answers.append(answer)
        printed = printed[end:].lstrip()
    if name == "json_schema":
        assert json.loads(answers[0]["choices"][0]["message"]["content"]).keys() == {"name", "age"}
    elif name == "tool_call":
        (call,) = answers[0]["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"city"}
    elif name == "completion":
        assert len(answers[0]["choices"]) == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_every_example_runs() -> None:
    assert len(SCRIPTS) >= 7
    async with structured_system(oracle) as (url, _):
        for script in SCRIPTS:
            check(script.stem, await run(script.name, [str(script)], url))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_every_curl_command_of_the_readme_runs() -> None:
    assert COMMANDS
    async with structured_system(oracle) as (url, _):
        for command in COMMANDS:
            assert DEFAULT_URL in command
            printed = await run(command, ["sh", "-c", command.replace(DEFAULT_URL, url)], url)
            assert json.loads(printed)["choices"]
