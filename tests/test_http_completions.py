"""Completions, models, tokens and probes as clients see them."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from services.http.app import HttpConfig
from tools.scripted_scheduler import ScriptedScheduler, bytes_bundle, target_identity
from tools.served_http import served_openai, served_raw


async def test_the_default_length_is_sixteen_tokens() -> None:
    scheduler = ScriptedScheduler(tuple(b"a very long answer indeed"))
    async with served_openai(scheduler) as client:
        answer = await client.completions.create(model="bytes", prompt="say")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "a very long answ"
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [list(b"say"), [list(b"say")], ["say"], "say"])
async def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any) -> None:
    scheduler = ScriptedScheduler()
    async with served_openai(scheduler) as client:
        answer = await client.completions.create(model="bytes", prompt=prompt)
    assert [choice.text for choice in answer.choices] == ["hello"]
    assert [request.token_ids for request in scheduler.requests] == [tuple(b"say")]


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    scheduler = ScriptedScheduler()
    async with served_openai(scheduler) as client:
        answer = await client.completions.create(model="bytes", prompt=["one", "three"], n=2, seed=5, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["onehello", "onehello", "threehello", "threehello"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("onethree"), 4 * len("hello"))
    by_prompt = {request.token_ids: set[int]() for request in scheduler.requests}
    for request in scheduler.requests:
        by_prompt[request.token_ids].add(request.sampling.seed)
    assert [len(seeds) for seeds in by_prompt.values()] == [2, 2]
    assert all(5 in seeds for seeds in by_prompt.values())


async def test_several_prompts_stream_side_by_side() -> None:
    async with served_openai(ScriptedScheduler()) as client:
        stream = await client.completions.create(model="bytes", prompt=["a", "b"], stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["hello", "hello"]


async def test_a_stop_text_ends_the_answer_before_it_or_behind_it() -> None:
    scheduler = ScriptedScheduler(tuple(b"one two three"))
    async with served_openai(scheduler) as client:
        before = await client.completions.create(model="bytes", prompt="x", stop=["two", "three"])
        behind = await client.completions.create(
            model="bytes", prompt="x", stop="two", extra_body={"include_stop_str_in_output": True}
        )
        stream = await client.completions.create(model="bytes", prompt="x", stop="two", stream=True)
        told = "".join([chunk.choices[0].text async for chunk in stream])
    assert (before.choices[0].text, before.choices[0].finish_reason) == ("one ", "stop")
    assert before.choices[0].to_dict()["stop_reason"] == "two"
    assert behind.choices[0].text == "one two"
    assert told == "one "


async def test_best_of_is_refused_unless_it_changes_nothing() -> None:
    async with served_openai(ScriptedScheduler()) as client:
        await client.completions.create(model="bytes", prompt="x", n=2, best_of=2)
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(model="bytes", prompt="x", n=1, best_of=2)
    assert caught.value.param == "best_of"


async def test_models_are_listed_and_found() -> None:
    name = "org/model"
    scheduler = ScriptedScheduler(
        identities=[target_identity(), target_identity(name)],
        bundles={"bytes": bytes_bundle(), name: bytes_bundle(name)},
    )
    async with served_openai(scheduler) as client:
        assert [model.id async for model in client.models.list()] == ["bytes", name]
        assert (await client.models.retrieve(name)).id == name
        with pytest.raises(NotFoundError, match="served: bytes, org/model") as caught:
            await client.models.retrieve("other")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with served_raw(ScriptedScheduler()) as client:
        tokens = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert (tokens["tokens"], tokens["count"], tokens["max_model_len"]) == ([104, 195, 169], 3, 1024)
        assert tokens["token_strs"][0] == "h"
        back = (await client.post("/detokenize", json={"tokens": [*tokens["tokens"], 256]})).json()
        assert back == {"prompt": "hé<|end|>"}
        messages = [{"role": "user", "content": "hi"}]
        chat = (await client.post("/tokenize", json={"messages": messages})).json()
        assert bytes(chat["tokens"]) == b"<user>hi\n<assistant>"
        refused = await client.post("/detokenize", json={"tokens": [104, 257]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_health_is_of_the_process_and_ready_of_the_service() -> None:
    scheduler = ScriptedScheduler()
    async with served_raw(scheduler, ready=lambda: scheduler.ready) as client:
        assert (await client.get("/ready")).status_code == 200
        scheduler.ready = False
        assert (await client.get("/health")).status_code == 200
        unready = await client.get("/ready")
    assert unready.status_code == 503
    assert "no live target" in unready.json()["error"]["message"]


async def test_metrics_are_what_is_rendered() -> None:
    shown = (b"outrider_up 1\n", "text/plain; version=0.0.4")
    async with served_raw(ScriptedScheduler(), render_metrics=lambda accept: shown) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert response.text == "outrider_up 1\n"


async def test_the_bodies_are_documented() -> None:
    async with served_raw(ScriptedScheduler()) as client:
        document = (await client.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "speculation", "draft_length", "accept_rule"} <= body["properties"].keys()


@pytest.mark.parametrize("configured", [True, False])
async def test_web_pages_of_other_origins_are_let_in_only_if_configured(configured: bool) -> None:
    config = HttpConfig(api_keys=("key",), cors_origins=("https://page.example",) if configured else ())
    async with served_raw(ScriptedScheduler(), config) as client:
        headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
        preflight = await client.options("/v1/chat/completions", headers=headers)
        other = await client.options("/v1/chat/completions", headers={**headers, "origin": "https://other.example"})
    assert preflight.headers.get("access-control-allow-origin") == ("https://page.example" if configured else None)
    assert "access-control-allow-origin" not in other.headers
