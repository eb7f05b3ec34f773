"""Every refusal is an OpenAI error body with the right status, names the field, and never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest

from scheduler.errors import DeadlineExceeded, Overloaded, RequestError, SequenceFailed, Unavailable
from services.http.app import HttpConfig
from tools.scripted_scheduler import CONTEXT, ScriptedScheduler
from tools.served_http import openai_client, served_http, served_openai, served_raw

HELLO: list[Any] = [{"role": "user", "content": "say hello"}]
CHAT = "/v1/chat/completions"


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error


WRONG_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"temprature": 1}, "temprature"),
    "unknown nested field": ({"stream": True, "stream_options": {"fast": True}}, "stream_options.fast"),
    "text for a number": ({"temperature": "1"}, "temperature"),
    "number for a text": ({"model": 5}, "model"),
    "bool for a number": ({"max_tokens": True}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "no answer": ({"max_tokens": 0}, "max_tokens"),
    "newer name": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "too long an answer": ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    "both names": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    "negative seed": ({"seed": -1}, "seed"),
    "seed too large": ({"seed": 2**64}, "seed"),
    "no messages": ({"messages": []}, "messages"),
    "message without content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "unknown role": ({"messages": [{"role": "ghost", "content": "x"}]}, "messages[0].role"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "result of no call": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    "call by a user": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": "x",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}],
                }
            ]
        },
        "messages[0].tool_calls",
    ),
    "arguments that are no JSON": (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": "{"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "too many top logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias too large": ({"logit_bias": {"1": 101}}, "logit_bias"),
    "bias outside the vocabulary": ({"logit_bias": {"257": 1}}, "logit_bias"),
    "choices": ({"n": 0}, "n"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "draft length": ({"draft_length": 0}, "draft_length"),
    "speculation": ({"speculation": "maybe"}, "speculation"),
    "accept rule": ({"accept_rule": "trust"}, "accept_rule"),
    "seed with rejection": ({"accept_rule": "rejection", "seed": 1}, "seed"),
    "two grammars": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    "schema missing": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "options without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "tool choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "stored": ({"store": True}, "store"),
    "paid for": ({"service_tier": "priority"}, "service_tier"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities[1]"),
    "effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "functions": ({"functions": []}, "functions"),
    "prediction": ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
}


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_wrong_field_is_named() -> None:
    scheduler = ScriptedScheduler()
    async with served_raw(scheduler) as client:
        for name, (fields, param) in WRONG_CHATS.items():
            error = error_of(await client.post(CHAT, json={"messages": HELLO, **fields}), 400)
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), name
    assert scheduler.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 2}, "n"),
        ({"prompt": "x" * (CONTEXT + 1)}, "prompt"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": 5}, "stop"),
    ],
)
async def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    async with served_raw(ScriptedScheduler()) as client:
        error = error_of(await client.post("/v1/completions", json=fields), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 5000, b'{"model": "\\ud800"}'],
)
async def test_what_is_no_json_object_is_a_400(content: bytes) -> None:
    async with served_raw(ScriptedScheduler()) as client:
        for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            error_of(response, 400)


async def test_other_content_is_a_415_and_a_json_dialect_is_fine() -> None:
    body = json.dumps({"messages": HELLO}).encode()
    async with served_raw(ScriptedScheduler()) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            error = error_of(await client.post(CHAT, content=body, headers={"content-type": kind}), 415)
            assert "application/json" in error["message"]
        right = await client.post(CHAT, content=body, headers={"content-type": "application/json; charset=utf-8"})
    assert right.status_code == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_a_413(declared: bool) -> None:
    config = HttpConfig(max_request_bytes=2000)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()

    async def pieces() -> Any:
        yield body

    async with served_raw(ScriptedScheduler(), config) as client:
        content = body if declared else pieces()
        response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert "2000 bytes" in error_of(response, 413)["message"]
        assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 200


async def test_routes_and_methods_that_are_not_there() -> None:
    async with served_raw(ScriptedScheduler()) as client:
        assert error_of(await client.get("/v1/engines"), 404)["code"] == "not_found"
        wrong = await client.get(CHAT)
        assert "POST" in error_of(wrong, 405)["message"]
        assert wrong.headers["allow"] == "POST"


async def test_a_model_that_is_not_served_is_a_404_with_those_that_are() -> None:
    async with served_openai(ScriptedScheduler()) as client:
        with pytest.raises(openai.NotFoundError, match="bytes") as caught:
            await client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("busy", retry_after=2.2), 429, openai.RateLimitError),
        (Unavailable("no live target"), 503, openai.InternalServerError),
        (DeadlineExceeded("too late"), 504, openai.InternalServerError),
        (SequenceFailed("not a number"), 500, openai.InternalServerError),
    ],
)
async def test_what_goes_wrong_at_the_start_has_its_status(
    error: RequestError, status: int, kind: type[openai.APIStatusError], stream: bool
) -> None:
    async with served_openai(ScriptedScheduler(fail_at_start=error)) as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="bytes", messages=HELLO, stream=stream)
    assert caught.value.status_code == status
    assert str(error) in str(caught.value)
    assert caught.value.response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


async def test_a_busy_server_is_tried_again_by_the_official_client() -> None:
    class BusyOnce(ScriptedScheduler):
        async def generate(self, request: Any) -> Any:
            if not self.requests:
                self.requests.append(request)
                raise Overloaded("busy", retry_after=0.01)
            async for event in super().generate(request):
                yield event

    scheduler = BusyOnce()
    async with served_http(scheduler) as url, openai_client(url, max_retries=1) as client:
        answer = await client.chat.completions.create(model="bytes", messages=HELLO)
    assert answer.choices[0].message.content == "hello"
    assert len(scheduler.requests) == 2


async def test_an_error_inside_a_stream_is_one_event_and_the_end() -> None:
    scheduler = ScriptedScheduler(fail_after=4)
    async with served_raw(scheduler) as client:
        response = await client.post(CHAT, json={"messages": HELLO, "stream": True})
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert sum("error" in event for event in events) == 1
    assert "[DONE]" not in response.text
    async with served_openai(scheduler) as official:
        stream = await official.chat.completions.create(model="bytes", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="no live target"):
            async for _ in stream:
                pass


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with served_raw(ScriptedScheduler(fail_at_start=RuntimeError("the secret is 5"))) as client:
        response = await client.post(CHAT, json={"messages": HELLO})
        assert (await client.get("/health")).status_code == 200
    error = error_of(response, 500)
    assert (error["type"], "secret" in error["message"]) == ("server_error", False)
    assert "the secret is 5" in caplog.text


async def test_keys_guard_everything_but_the_probes() -> None:
    async with served_http(ScriptedScheduler(), HttpConfig(api_keys=("one", "two"))) as url:
        async with openai_client(url, api_key="two") as client:
            answer = await client.chat.completions.create(model="bytes", messages=HELLO)
            assert answer.choices[0].message.content == "hello"
        async with openai_client(url, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.chat.completions.create(model="bytes", messages=HELLO)
            assert caught.value.code == "invalid_api_key"
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as raw:
            assert [(await raw.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
            for path in ("/v1/models", "/version", "/metrics", "/openapi.json", "/nothing"):
                error_of(await raw.get(path), 401)
            odd = [(b"authorization", b"Bearer \xff\xfe")]
            error_of(await raw.get("/v1/models", headers=odd), 401)


async def test_a_request_has_a_name_of_its_own_or_the_one_it_came_with() -> None:
    scheduler = ScriptedScheduler()
    async with served_raw(scheduler) as client:
        given = await client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "mine-1"})
        made = await client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "x" * 300})
    assert given.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req_")
    assert [request.request_id for request in scheduler.requests] == ["mine-1", made.headers["x-request-id"]]


async def test_the_trace_context_is_passed_on() -> None:
    scheduler = ScriptedScheduler()
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    async with served_raw(scheduler) as client:
        await client.post(CHAT, json={"messages": HELLO}, headers={"traceparent": traceparent})
    assert scheduler.requests[0].traceparent == traceparent


async def test_many_wrong_requests_at_once_leave_the_server_well() -> None:
    async with served_raw(ScriptedScheduler()) as client:
        bodies = [{"messages": HELLO, **fields} for fields, _ in WRONG_CHATS.values()] * 3
        responses = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        assert {response.status_code for response in responses} == {400}
        assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 200
