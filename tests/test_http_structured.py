"""Structured output and forced tool calls over HTTP, on a table model whose grammar is kept by real masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest
import tokenizers
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion, ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from services.http.chat_body import ChatBody
from services.http.grammars import tool_call_grammar
from services.tokenizer import Tokenizer
from services.tools import CLOSE, OPEN, marks_are_tokens, parse_tool_calls
from specdec.grammars import Grammars
from specdec.messages import TokenizerBundle
from tools.grammar_system import SCHEMAS, GrammarDeployment
from tools.grammar_vocabulary import VOCABULARY
from tools.http_system import structured_system
from tools.scripted import Script, WrongFrom, oracle
from tools.scripted_scheduler import END_ID, bytes_tokenizer
from tools.served_http import openai_client
from tools.tool_template import TOOL_TEMPLATE

ANTI = WrongFrom(0, VOCABULARY)
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "fill it in"}]
POINT: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "point",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "red": {"type": "boolean"}},
            "required": ["x", "red"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
REST: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "rest", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


@asynccontextmanager
async def deployment(script: Script) -> AsyncIterator[tuple[AsyncOpenAI, GrammarDeployment]]:
    async with structured_system(script) as (url, system), openai_client(url) as client:
        yield client, system


@pytest.mark.parametrize(("script", "count"), [(oracle, 100), (ANTI, 30)], ids=["oracle", "anti"])
async def test_schema_requests_end_in_a_stop_and_match(script: Script, count: int) -> None:
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(count)]

    async def ask(client: AsyncOpenAI, i: int) -> ChatCompletion:
        schema: Any = {"name": "answer", "strict": True, "schema": SCHEMAS[names[i]]}
        response_format: Any = {"type": "json_schema", "json_schema": schema}
        return await client.chat.completions.create(
            model="table", messages=ASK, seed=i, temperature=(0.7, 1.0)[i % 2], response_format=response_format
        )

    async with deployment(script) as (client, system):
        answers = await asyncio.gather(*(ask(client, i) for i in range(len(names))))
        forbidden = system.num_forbidden
    accepted = drafted = 0
    for name, answer in zip(names, answers, strict=True):
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", name
        assert choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), SCHEMAS[name])
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        accepted += details.accepted_prediction_tokens or 0
        drafted += (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0)
        figures = answer.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index]
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] == len(figures["per_step_drafted"])
        assert figures["num_accepted_draft_tokens"] == sum(figures["per_step_accepted"])
    if script is oracle:
        assert accepted > 0.9 * drafted > 0
    else:
        assert accepted < 0.1 * drafted
        assert forbidden > 100


async def test_a_call_that_is_required_is_made_and_parsed_whole_and_streamed() -> None:
    async with deployment(oracle) as (client, _):
        for seed in range(4):
            fields: Any = {"tools": [POINT, REST], "tool_choice": "required", "parallel_tool_calls": False}
            whole = await client.chat.completions.create(model="table", messages=ASK, seed=seed, **fields)
            (choice,) = whole.choices
            assert choice.finish_reason == "tool_calls"
            assert not choice.message.content
            (call,) = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name in ("point", "rest")
            stream = await client.chat.completions.create(model="table", messages=ASK, seed=seed, stream=True, **fields)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            (streamed,) = [told for delta in deltas for told in delta.tool_calls or ()]
            assert streamed.function is not None
            assert streamed.function.model_dump() == call.function.model_dump()


async def test_a_named_call_has_arguments_of_its_schema() -> None:
    function: Any = {"type": "function", "function": {"name": "point"}}
    async with deployment(oracle) as (client, _):
        answer = await client.chat.completions.create(
            model="table", messages=ASK, tools=[REST, POINT], tool_choice=function, n=3, seed=1
        )
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert calls
        for call in calls:
            assert call.type == "function"
            assert call.function.name == "point"
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"x", "red"}
            assert 0 <= arguments["x"] <= 9


async def test_json_object_and_guided_fields_are_kept() -> None:
    async with deployment(oracle) as (client, _):
        thing = await client.chat.completions.create(
            model="table", messages=ASK, response_format={"type": "json_object"}, seed=3, max_tokens=400
        )
        choice = await client.chat.completions.create(
            model="table", messages=ASK, extra_body={"guided_choice": ["red", "cab"]}
        )
        regex = await client.completions.create(
            model="table", prompt="x", max_tokens=50, extra_body={"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}
        )
    if thing.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(thing.choices[0].message.content or ""), dict)
    assert choice.choices[0].message.content in ("red", "cab")
    text = regex.choices[0].text
    assert (len(text), text[3], set(text[:3]) <= {"a", "b"}, text[4:].isdecimal()) == (6, "-", True, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"tools": [REST], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [POINT]}, "tools[0].function.strict"),
        ({"tools": [REST, REST]}, "tools"),
        ({"tools": [REST], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_the_name_it_was_asked_by(fields: dict[str, Any], param: str) -> None:
    async with deployment(oracle) as (client, _):
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="table", messages=ASK, extra_body=fields)
        assert caught.value.param == param


@pytest.mark.parametrize("as_tokens", [True, False])
def test_a_call_is_written_with_the_marks_that_the_vocabulary_has(as_tokens: bool) -> None:
    """Qwen2.5 has a token for each: one that is spelled in letters would be none that it ever saw."""
    inner = tokenizers.Tokenizer.from_str(bytes_tokenizer().decode())
    if as_tokens:
        inner.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in (OPEN, CLOSE)])
    size = inner.get_vocab_size()
    tokenizer = Tokenizer(TokenizerBundle("bytes", inner.to_str().encode(), TOOL_TEMPLATE, None, (END_ID,), 1024, size))
    assert marks_are_tokens(tokenizer) is as_tokens
    body = ChatBody.model_validate({"messages": ASK, "tools": [POINT], "tool_choice": "required"})
    grammar = tool_call_grammar(body.forced_tools, True, marks_are_tokens(tokenizer))
    call = '<tool_call>\n{"name": "point", "arguments": {"x": 1, "red": true}}\n</tool_call>'
    answer = tokenizer.encode(f"{call}\n{call}")
    assert (len(answer) < 2 * len(call)) is as_tokens
    mask = Grammars(inner.to_str().encode(), size, [END_ID])(grammar)
    for i, token_id in enumerate([*answer, END_ID]):
        assert mask.allowed(answer[:i])[token_id // 8] >> token_id % 8 & 1, f"token {i}"
    assert len(parse_tool_calls(tokenizer.decode(answer))[1]) == 2
