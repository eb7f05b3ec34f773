"""Nothing of a prompt or an answer is in any log, of any role, at any level, whatever goes wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from services import logs
from services.gateway import Gateway
from services.generation import TextPrompt, UserRequest
from services.logs import LogConfig
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.identities import tokenizer_bundle
from tools.log_lines import lines, logged
from tools.scripted import FailingDrafter, ScriptedDrafter, oracle
from tools.served_http import served_http
from tools.table_law import TableLaw
from tools.table_model import Fault, FaultKind, TableModel

VOCABULARY = 50_000
LAW = TableLaw(VOCABULARY)
IDS = (48611, 47123, 49871)
WORDS = " ".join(f"w{token_id}" for token_id in IDS)
CANARY = "canary-of-a-prompt"
RAISING = (
    "{% for message in messages %}{% if message.content.startswith('raise') %}"
    "{{ raise_exception(message.content) }}{% endif %}{{ message.content }} {% endfor %}"
)
MARKS = (CANARY, *(f"w{token_id}" for token_id in IDS), *map(str, IDS))
"""Text that is no word of the vocabulary, and ids that no other number looks like."""


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    with logged(monkeypatch) as stream:
        yield stream


def broken_bodies() -> list[dict[str, object]]:
    """Each refused or failing in a way of its own, with content in what is wrong."""
    chat = {"messages": [{"role": "user", "content": CANARY}]}
    return [
        {"messages": [{"role": CANARY, "content": WORDS}]},
        {**chat, "temperature": CANARY},
        {**chat, "stop": [CANARY] * 1000},
        {**chat, "max_tokens": 10**9},
        {**chat, "model": CANARY},
        {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": CANARY}}}},
        {**chat, "tools": [{"type": "function", "function": {"name": CANARY}}]},
        {"messages": [{"role": "user", "content": f"raise {CANARY}"}]},
        {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4},
        {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4, "stream": True},
    ]


async def test_no_log_holds_anything_of_a_request(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target, draft worker, scheduler and gateway run in this process, so their lines are all here."""
    logs.configure("scheduler", LogConfig(level="debug", format="json"))
    model = TableModel(LAW, context_length=512)
    drafter = FailingDrafter(ScriptedDrafter(oracle, LawContinuation(LAW)))
    drafter.failing = False
    async with Deployment([model], [drafter], quick_config()) as system:
        bundle = tokenizer_bundle(system.targets[0].worker.identity, ())
        system.targets[0].bundle = replace(bundle, chat_template=RAISING)
        async with served_http(system.scheduler) as url, httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            for body in broken_bodies():
                await client.post("/v1/chat/completions", json=body)
            await client.post("/v1/chat/completions", content=b'{"messages": "' + CANARY.encode())

            def fail(*values: object) -> None:
                raise RuntimeError(f"planted: {values} {CANARY}")

            body = {"prompt": WORDS, "max_tokens": 3}
            for where in ("_stop_conditions", "_judge_grammar"):
                with monkeypatch.context() as planted:
                    planted.setattr(Gateway, where, fail)
                    assert (await client.post("/v1/completions", json=body)).status_code == 500
            drafter.failing = True
            await client.post("/v1/completions", json={"prompt": WORDS, "max_tokens": 8})
            drafter.failing = False
            for kind in FaultKind:
                model.faults = [Fault(kind, IDS[0])]
                assert (await client.post("/v1/completions", json=body)).status_code == 500

    seen = lines(written)
    told = " ".join(str(line["event"]) for line in seen)
    for words in ("request failed", "drafting for", "failed", "is connected"):
        assert words in told
    assert [line for line in seen if any(mark in json.dumps(_without_source(line)) for mark in MARKS)] == []


async def test_log_prompts_logs_them(written: io.StringIO) -> None:
    logs.configure("scheduler", LogConfig(format="json", prompts=True))
    async with Deployment([TableModel(LAW)]) as system:
        gateway = Gateway(system.scheduler, log_prompts=True)
        async for _ in gateway.generate(UserRequest(prompt=TextPrompt(WORDS), max_tokens=2, temperature=0.0)):
            pass

    seen = lines(written)
    assert [line["prompt"] for line in seen if "prompt" in line] == [WORDS]
    assert [line for line in seen if "answer" in line]


def _without_source(line: dict[str, object]) -> dict[str, object]:
    """Without the lines of this file that a traceback shows: they are no values."""
    shown = str(line.get("exception", "")).splitlines()
    return {**line, "exception": [text for text in shown if not text.startswith("    ")]}
