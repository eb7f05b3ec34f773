"""The official client on SmolLM2, through `outrider up`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tools.up import Up

pytestmark = pytest.mark.timeout(300)

COPY: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Repeat this three times: the quick brown fox jumps over the lazy dog."}
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 40},
        "colour": {"enum": ["brown", "black", "white"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[OpenAI]:
    with Up(target="", draft="") as up:
        up.wait_ready()
        with httpx2.Client(trust_env=False, timeout=120) as connections:
            yield OpenAI(base_url=up.base_url, api_key="any", http_client=connections, max_retries=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_token_of_a_real_model(client: OpenAI, temperature: float) -> None:
    def ask(speculation: str) -> Any:
        return client.chat.completions.create(
            model="smollm2-135m",
            messages=COPY,
            max_tokens=40,
            temperature=temperature,
            seed=5,
            logprobs=True,
            top_logprobs=2,
            extra_body={"speculation": speculation},
        )

    plain, speculative = ask("off"), ask("on")
    assert speculative.choices[0].message.content == plain.choices[0].message.content
    assert [entry.token for entry in speculative.choices[0].logprobs.content] == [
        entry.token for entry in plain.choices[0].logprobs.content
    ]
    assert [entry.logprob for entry in speculative.choices[0].logprobs.content] == pytest.approx(
        [entry.logprob for entry in plain.choices[0].logprobs.content], abs=1e-4
    )
    figures = speculative.to_dict()["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] > 0
    assert plain.to_dict()["metrics"]["speculative_decoding"] is None


def test_a_stream_joins_to_the_whole_and_ends_once(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "smollm2-135m", "messages": COPY, "max_tokens": 24, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**fields)
    texts, reasons = ["", ""], ["", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_an_answer_is_json_of_its_schema(client: OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "horse", "strict": True, "schema": SCHEMA}}
    for animal in ("horse", "cat"):
        answer = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": f"Describe a {animal}."}],
            temperature=0,
            max_tokens=200,
            response_format=schema,
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_a_stop_text_and_a_model_without_tools(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2-135m", prompt="1, 2, 3, 4, 5, 6, 7, 8,", max_tokens=30, temperature=0, stop=["11"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "10" in answer.choices[0].text
    assert "11" not in answer.choices[0].text
    tool: Any = {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="smollm2-135m", messages=COPY, tools=[tool])
    assert caught.value.param == "tools"
