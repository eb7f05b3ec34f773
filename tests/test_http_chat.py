"""Chat completions as the official client sees them: whole, streamed, with tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletionChunk, ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from specdec.params import AcceptRule, GrammarKind, LogprobsOf
from tools.scripted_scheduler import ScriptedScheduler, bytes_bundle
from tools.served_http import served_openai, served_raw
from tools.tool_template import TOOL_TEMPLATE

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def speaking(answer: str, block: int = 2) -> ScriptedScheduler:
    """A model that takes tools."""
    return ScriptedScheduler(tuple(answer.encode()), block, bundles={"bytes": bytes_bundle(template=TOOL_TEMPLATE)})


async def chunks_of(scheduler: ScriptedScheduler, **fields: Any) -> list[ChatCompletionChunk]:
    async with served_openai(scheduler) as client:
        stream = await client.chat.completions.create(model="bytes", messages=HELLO, stream=True, **fields)
        return [chunk async for chunk in stream]


def content(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_a_whole_answer_has_text_reason_usage_seed_and_fingerprint() -> None:
    scheduler = ScriptedScheduler(tuple("héllo 🎠".encode()))
    async with served_openai(scheduler) as client:
        answer = await client.chat.completions.create(model="bytes", messages=HELLO, max_tokens=50, seed=7)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "héllo 🎠", "length")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("héllo 🎠".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 1)
    assert answer.to_dict()["seed"] == 7
    assert bytes(scheduler.requests[0].token_ids).decode() == "<user>say hello\n<assistant>"


async def test_a_stream_has_the_role_first_the_reason_last_and_done_once() -> None:
    async with served_raw(ScriptedScheduler(tuple("héllo 🎠".encode()))) as client:
        body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "héllo 🎠"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len("héllo 🎠".encode())
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_include_usage_no_chunk_speaks_of_it() -> None:
    chunks = await chunks_of(ScriptedScheduler())
    assert content(chunks) == "hello"
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert "metrics" in chunks[-1].to_dict()


@pytest.mark.parametrize("obfuscated", [True, False])
async def test_obfuscation_hides_how_long_a_chunk_is_unless_it_is_switched_off(obfuscated: bool) -> None:
    options = {} if obfuscated else {"stream_options": {"include_obfuscation": False}}
    sizes = set()
    for word in ("a", "horse", "🎠🐎", "straightforwardly"):
        async with served_raw(ScriptedScheduler(tuple(word.encode()), block=100)) as client:
            response = await client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **options})
        (spoken,) = [event for event in response.content.split(b"\n\n") if f'"content":"{word}"'.encode() in event]
        assert (b"obfuscation" in spoken) is obfuscated
        sizes.add(len(spoken))
    assert (len(sizes) == 1) is obfuscated


async def test_choices_come_mixed_and_each_is_whole() -> None:
    chunks = await chunks_of(ScriptedScheduler(), n=3)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].choices[0].delta.role == "assistant"
        assert content(own) == "hello"
        assert own[-1].choices[0].finish_reason == "length"
    seeds = {chunk.choices[0].to_dict().get("seed") for chunk in chunks if chunk.choices[0].finish_reason}
    assert len(seeds) == 3


async def test_every_field_reaches_the_scheduler() -> None:
    scheduler = ScriptedScheduler()
    extra: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.25,
        "typical_p": 0.5,
        "repetition_penalty": 2.0,
        "bad_words": ["no"],
        "allowed_token_ids": [101, 104, 108, 111],
        "min_tokens": 2,
        "stop_token_ids": [7],
        "draft_length": 3,
        "speculation": "on",
        "accept_rule": "invariant",
        "logprobs_of": "processed",
    }
    async with served_openai(scheduler) as client:
        await client.chat.completions.create(
            model="bytes",
            messages=HELLO,
            temperature=0.5,
            top_p=0.75,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"104": 3},
            max_completion_tokens=9,
            seed=11,
            user="somebody",
            metadata={"for": "a test"},
            extra_body=extra,
        )
    (request,) = scheduler.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.75, 0.25)
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.5, 2.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == (((104, 3.0),), (101, 104, 108, 111))
    assert tuple(b"no") in sampling.bad_words
    assert (sampling.seed, sampling.accept_rule) == (11, AcceptRule.INVARIANT)
    assert (request.max_tokens, request.min_tokens, request.stop_token_ids) == (9, 2, frozenset({7, 256}))
    assert request.report.logprobs_of is LogprobsOf.PROCESSED
    assert (request.draft_length, request.speculation.value) == (3, "on")


@pytest.mark.parametrize("hyphen", [True, False])
async def test_the_extension_fields_may_come_as_headers(hyphen: bool) -> None:
    scheduler = ScriptedScheduler()
    names = ("draft-length", "accept-rule") if hyphen else ("draft_length", "accept_rule")
    headers = {"speculation": "off", names[0]: "4", names[1]: "block"}
    async with served_openai(scheduler) as client:
        await client.chat.completions.create(model="bytes", messages=HELLO, extra_headers=headers)
        with pytest.raises(BadRequestError, match="speculation is on in the body and off in the header"):
            await client.chat.completions.create(
                model="bytes", messages=HELLO, extra_headers=headers, extra_body={"speculation": "on"}
            )
    (request,) = scheduler.requests
    assert (request.speculation.value, request.draft_length) == ("off", 4)
    assert request.sampling.accept_rule is AcceptRule.BLOCK


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {}}}},
            GrammarKind.JSON_SCHEMA,
            "{}",
        ),
        ({"guided_json": {"type": "null"}}, GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE, '["a", "b"]'),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json": "{}"}}, GrammarKind.JSON_SCHEMA, "{}"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, '["a"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
    ],
)
async def test_each_way_to_say_what_the_answer_matches(
    fields: dict[str, Any], kind: GrammarKind | None, text: str
) -> None:
    scheduler = ScriptedScheduler()
    async with served_openai(scheduler) as client:
        await client.chat.completions.create(model="bytes", messages=HELLO, extra_body=fields)
    grammar = scheduler.requests[0].sampling.grammar
    assert (None if grammar is None else (grammar.kind, grammar.text)) == (None if kind is None else (kind, text))


async def test_messages_with_parts_calls_and_results_go_through_the_template() -> None:
    scheduler = speaking("It rains.")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    async with served_openai(scheduler) as client:
        await client.chat.completions.create(model="bytes", messages=messages, tools=[WEATHER])
    prompt = bytes(scheduler.requests[0].token_ids).decode()
    assert prompt.startswith("<tools>weather:")
    assert "<system>Be brief.\n<user>Weather\nin Rome?\n<assistant>" + CALL + "\n<tool>rain\n<assistant>" in prompt


@pytest.mark.parametrize("block", [1, 7, 1000])
async def test_a_call_is_parsed_whole_and_streamed(block: int) -> None:
    tools: Any = [WEATHER]
    scheduler = speaking(f"I look.\n{CALL}\n{CALL}", block)
    scheduler.answer = (*scheduler.answer, 256)
    async with served_openai(scheduler) as client:
        whole = await client.chat.completions.create(model="bytes", messages=HELLO, tools=tools)
        stream = await client.chat.completions.create(model="bytes", messages=HELLO, tools=tools, stream=True)
        chunks = [chunk async for chunk in stream]
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is not None
    assert len({call.id for call in choice.message.tool_calls}) == 2
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    told = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert content(chunks) == "I look."
    assert [call.index for call in told] == [0, 1]
    assert all(call.function is not None and call.function.name == "weather" for call in told)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_message_that_was_answered_can_be_sent_back_as_it_came() -> None:
    scheduler = speaking(CALL)
    async with served_openai(scheduler) as client:
        answer = await client.chat.completions.create(model="bytes", messages=HELLO, tools=[WEATHER])
        message: Any = answer.choices[0].message.to_dict()
        turn: Any = [*HELLO, message, {"role": "tool", "tool_call_id": "x", "content": "sun"}]
        await client.chat.completions.create(model="bytes", messages=turn)
    assert CALL in bytes(scheduler.requests[1].token_ids).decode()


async def test_with_tool_choice_none_the_model_is_not_told_and_the_answer_stays_text() -> None:
    scheduler = speaking(CALL)
    async with served_openai(scheduler) as client:
        answer = await client.chat.completions.create(
            model="bytes",
            messages=HELLO,
            tools=[WEATHER],
            tool_choice="none",
        )
    assert answer.choices[0].message.content == CALL
    assert b"<tools>" not in bytes(scheduler.requests[0].token_ids)


async def test_without_parallel_calls_the_answer_ends_behind_the_first() -> None:
    scheduler = speaking(f"{CALL}\n{CALL}")
    async with served_openai(scheduler) as client:
        answer = await client.chat.completions.create(
            model="bytes",
            messages=HELLO,
            tools=[WEATHER],
            parallel_tool_calls=False,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or ()) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_be_made_becomes_a_grammar(choice: Any) -> None:
    scheduler = speaking(CALL)
    async with served_openai(scheduler) as client:
        await client.chat.completions.create(
            model="bytes",
            messages=HELLO,
            tools=[WEATHER],
            tool_choice=choice,
        )
    grammar = scheduler.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert "weather" in grammar.text


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
async def test_a_model_that_knows_no_tools_refuses_them_by_name(template: str | None) -> None:
    scheduler = ScriptedScheduler(bundles={"bytes": bytes_bundle(template=template)})
    async with served_openai(scheduler) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="bytes", messages=HELLO, tools=[WEATHER])
        assert caught.value.param == ("tools" if template else "messages")
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(
                model="bytes",
                messages=HELLO,
                tools=[WEATHER],
                tool_choice="required",
            )
    assert caught.value.param == "tool_choice"
