"""What the page is made of and fed with, over HTTP: nothing of anybody's text but to who asked, and keys where they are
wanted."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from scheduler.request import GenerationRequest
from services.http.app import HttpConfig
from services.http.ui_routes import LIBRARY
from specdec.params import SamplingParams
from tools.deployment import quick_config
from tools.page_system import LAW, page_system, scripted
from tools.scripted import WrongFrom, oracle
from tools.waiting import until

KEYS = HttpConfig(api_keys=("right",))
ASK = {"prompt": "w1 w2 w3", "max_tokens": 40, "temperature": 0.9, "seed": "5"}
Event = dict[str, Any]


def client(url: str, key: str = "") -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False, headers=headers)


async def events(http: httpx2.AsyncClient, method: str, path: str, body: Event | None = None) -> AsyncIterator[Event]:
    async with http.stream(method, path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


async def test_the_page_needs_no_key_and_what_it_reads_does() -> None:
    async with page_system([], http=KEYS) as system, client(system.url) as http:
        for path in ("/ui", *(f"/ui/{name}" for name in LIBRARY)):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/")).headers["location"] == "/ui"
        assert (await http.get("/ui/index.html")).status_code == 401
        assert (await http.get("/ui/events")).status_code == 401
        assert (await http.post("/ui/ask", json=ASK)).status_code == 401
        async with client(system.url, "right") as known:
            assert (await known.get("/ui/uPlot.LICENSE")).status_code == 404
            first = await anext(events(known, "GET", "/ui/events"))
    assert first["type"] == "status"
    assert first["ready"]


async def test_the_page_may_run_its_own_script_and_load_nothing_from_elsewhere() -> None:
    async with page_system([]) as system, client(system.url) as http:
        response = await http.get("/ui")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2  # one script, one style
    page = response.text
    assert not re.search(r"""(?:src|href)=["'](?!/ui/|data:)""", page)
    assert "innerHTML" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


@pytest.mark.parametrize("window", [1, 3])
async def test_an_answer_comes_with_its_sources_and_the_guesses_that_were_wrong(window: int) -> None:
    drafter = scripted(WrongFrom(3, LAW.vocabulary_size))
    config = replace(quick_config(5), window=window)
    async with page_system([drafter], config) as system, client(system.url) as http:
        told = [event async for event in events(http, "POST", "/ui/ask", ASK)]
        request = GenerationRequest((1, 2, 3), SamplingParams(temperature=0.9, seed=5), max_tokens=40)
        truth = await system.deployment.plain(request)
    start, *pieces, end = told
    assert (start["type"], start["seed"], end["type"], end["tokens"]) == ("start", "5", "end", 40)
    assert "".join(piece for event in pieces for piece in event["pieces"]).split() == [f"w{t}" for t in truth.token_ids]
    corrected = [event for event in pieces if "correction" in event["sources"]]
    assert len(corrected) >= 8
    for event in corrected:
        place = event["position"] + event["sources"].index("correction")
        wrong = (truth.token_ids[place] + 1) % LAW.vocabulary_size
        assert event["rejected"][0] == [f"w{wrong}"]
        assert len(event["rejected"]) == 2  # the one behind it fell with it


async def test_events_tell_of_all_sequences_but_nothing_of_their_text() -> None:
    async with page_system([scripted(oracle)]) as system, client(system.url) as http:
        stream = events(http, "GET", "/ui/events")
        status = await anext(stream)
        seen: list[Event] = (await anext(stream))["entries"]
        answer = [event async for event in events(http, "POST", "/ui/ask", ASK)]
        while not seen or seen[-1]["kind"] != "ended":
            event = await anext(stream)
            seen += event["entries"] if event["type"] == "entries" else []
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: not system.rounds._feeds, "the feed of a closed page is gone")
    assert [worker["role"] for worker in status["workers"]] == ["target", "draft"]
    assert status["workers"][0]["lease"] == 4.5
    assert status["workers"][0]["kv_total"] > 0
    assert [entry["kind"] for entry in seen[:2]] == ["admitted", "placed"]
    steps = [entry for entry in seen if entry["kind"] == "step"]
    assert sum(len(step["sources"]) for step in steps) == 40
    assert {entry["sequence"] for entry in seen} == {answer[0]["sequence"]}
    told = json.dumps([status, seen])
    words = {piece.strip() for event in answer if event["type"] == "tokens" for piece in event["pieces"]}
    assert len(words) > 10
    assert not any(f'"{word}"' in told for word in words)
    allowed = {"sequence", "at", "kind", "number", "sources", "began_at", "step_time", "batch", "drafted", "accepted"}
    assert all(set(step) <= allowed | {"draft", "reason"} for step in steps)


async def test_a_wrong_question_is_refused_by_name() -> None:
    async with page_system([]) as system, client(system.url) as http:
        wrong = {"prompt": "", "temperature": -1, "seed": "-1", "max_tokens": 0}
        for field, value in wrong.items():
            body = {**ASK, field: value}
            response = await http.post("/ui/ask", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        response = await http.post("/ui/ask", content="prompt=w1", headers={"content-type": "text/plain"})
        assert response.status_code == 415  # so that another site's form cannot ask
