"""Valid bodies, each field of them changed in many ways: answered or refused by name, never a 500."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2

from services.http.bodies import GenerationBody
from services.http.chat_body import ChatBody
from services.http.completion_body import CompletionBody
from tools.http_system import http_system
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw

LAW = TableLaw()
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
COMMON: dict[str, Any] = {
    "model": "table",
    "stream": False,
    "stream_options": None,
    "max_tokens": 4,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "typical_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.5},
    "bad_words": ["w1"],
    "allowed_token_ids": list(range(64)),
    "seed": 3,
    "n": 2,
    "stop": ["w50"],
    "include_stop_str_in_output": False,
    "stop_token_ids": [40],
    "ignore_eos": False,
    "logprobs_of": "raw",
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "speculation": "auto",
    "draft_length": 3,
    "accept_rule": "invariant",
    "request_id": "r",
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "store": False,
    "service_tier": "auto",
    "skip_special_tokens": True,
}
CHAT: dict[str, Any] = {
    **COMMON,
    "messages": [{"role": "user", "content": "w1 w2 w3"}],
    "max_completion_tokens": None,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [TOOL],
    "tool_choice": "none",
    "parallel_tool_calls": None,
    "modalities": ["text"],
}
COMPLETION: dict[str, Any] = {**COMMON, "prompt": "w1 w2 w3", "echo": False, "logprobs": 2, "best_of": 2}

WELL: dict[str, list[Any]] = {
    "stream": [True],
    "max_tokens": [1, 9],
    "min_tokens": [0, 4],
    "temperature": [0, 1.5, 1e-40],
    "top_p": [1, 0.1],
    "top_k": [0, -1, 1],
    "min_p": [0, 1],
    "n": [1],
    "seed": [0, 2**64 - 1],
    "stop": ["w7", [], "🐎"],
    "logit_bias": [{}, {"1": -100}],
    "speculation": ["on", "off"],
    "messages": [[{"role": "system", "content": "w1"}, {"role": "assistant", "content": "w2"}]],
    "prompt": [[1, 2], ["w1", "w2"], [[1], [2, 3]]],
}
ODD: list[Any] = [None, "x", "", -1, 2**70, 1e308, True, [], {}, [None], {"a": [1]}, "\u0000", [[]], 0.5]


def mutations(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Three odd values at least of each field, well-meant ones where there are some, and the field left out."""
    for place, field in enumerate(body):
        values = WELL.get(field, []) + [ODD[(place + i * 5) % len(ODD)] for i in range(3)]
        for value in values:
            yield field, {**copy.deepcopy(body), field: value}
        yield field, {name: value for name, value in body.items() if name != field}
    for field in (f"{name}s" for name in list(body)[::8]):
        yield field, {**copy.deepcopy(body), field: 1}


def test_the_valid_bodies_have_every_field() -> None:
    def fields(kind: type[GenerationBody]) -> set[str]:
        return set(kind.model_fields)

    assert set(CHAT) == fields(ChatBody)
    assert set(COMPLETION) == fields(CompletionBody)


async def test_a_mutated_body_is_answered_or_refused_by_name() -> None:
    answered: Counter[str] = Counter()
    mutated: Counter[str] = Counter()
    async with (
        http_system(LAW, [TableDrafter(LAW)]) as (_, _, url),
        httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            assert (await client.post(path, json=body)).status_code == 200
            for field, mutation in mutations(body):
                response = await client.post(path, json=mutation)
                mutated[f"{path} {field}"] += 1
                where = f"{path} {field} {json.dumps(mutation.get(field))}: {response.text[:300]}"
                if response.status_code == 200:
                    answered[path] += 1
                    assert "error" not in response.text, where
                    continue
                assert response.status_code in (400, 404), where
                error = response.json()["error"]
                assert error.keys() == {"message", "type", "param", "code"}, where
                assert error["type"] == "invalid_request_error", where
                assert error["param"], where
                # Where two fields clash, either is to blame and the message tells of both.
                assert field in f"{error['param']} {error['message']}", where
        assert (await client.get("/health")).status_code == 200
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            assert (await client.post(path, json=body)).status_code == 200
    total = sum(mutated.values())
    print(f"{total} mutations, answered: {dict(answered)}")
    assert total >= 200
    assert all(mutated[f"/v1/chat/completions {field}"] >= 3 for field in CHAT)
    assert all(mutated[f"/v1/completions {field}"] >= 3 for field in COMPLETION)
    assert sum(answered.values()) >= 0.3 * total, f"{answered} of {total}"
