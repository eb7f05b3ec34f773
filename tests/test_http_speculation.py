"""Over HTTP, speculation changes nothing that is said: text, tokens, log probabilities, usage."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from specdec.law import Law
from specdec.params import SamplingParams, StopConditions
from tools.http_system import http_system
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw

LAW = TableLaw(sharpness=6.0)
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "w1 w2 w3 w4"}]
PROMPT = [1, 2, 3, 4]

FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "shortlist": {"extra_body": {"top_k": 5, "min_p": 0.05, "typical_p": 0.9}},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.3}},
    "bias": {"logit_bias": {"7": 5, "8": -100}, "extra_body": {"bad_words": ["w9", "w10 w11"]}},
    "allowed": {"extra_body": {"allowed_token_ids": list(range(0, 64, 3)), "min_tokens": 10}},
    "stops": {"stop": ["w5 w", "w20"], "extra_body": {"include_stop_str_in_output": True}},
    "forced": {"temperature": 0.5, "extra_body": {"ignore_eos": True, "stop_token_ids": [12]}},
}


def told(answer: ChatCompletion) -> list[Any]:
    """All of an answer that may not depend on how it was decoded."""
    told = []
    for choice in answer.choices:
        entries = choice.logprobs.content or [] if choice.logprobs else []
        tokens = [(entry.token, [top.token for top in entry.top_logprobs]) for entry in entries]
        seed = choice.to_dict()["seed"]
        told.append((choice.index, choice.message.content, choice.finish_reason, tokens, seed))
    usage = answer.usage
    assert usage is not None
    return [*told, usage.prompt_tokens, usage.completion_tokens]


def logprobs(answer: ChatCompletion) -> list[float]:
    """Of the tokens and of the likeliest beside them."""
    values = []
    for choice in answer.choices:
        for entry in (choice.logprobs.content if choice.logprobs else None) or []:
            values += [entry.logprob, *(top.logprob for top in entry.top_logprobs)]
    return values


@pytest.mark.parametrize("name", FIELDS)
async def test_every_parameter_says_the_same_with_and_without_speculation(name: str) -> None:
    fields = dict(FIELDS[name])
    extra: dict[str, Any] = fields.pop("extra_body", {})

    async with http_system(LAW, [TableDrafter(LAW, 0.8)]) as (client, _, _):

        async def ask(speculation: str, seed: int) -> ChatCompletion:
            answer: ChatCompletion = await client.chat.completions.create(
                model="table",
                messages=ASK,
                n=3,
                seed=seed,
                max_tokens=40,
                logprobs=True,
                top_logprobs=4,
                extra_body={**extra, "speculation": speculation, "draft_length": 3},
                **fields,
            )
            return answer

        for seed in range(3):
            plain, speculative = await asyncio.gather(ask("off", seed), ask("on", seed))
            assert told(speculative) == told(plain)
            assert logprobs(speculative) == pytest.approx(logprobs(plain), abs=1e-4)
            assert plain.to_dict()["metrics"] == {"speculative_decoding": None}
            figures: Any = speculative.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index]
            details = speculative.usage.completion_tokens_details if speculative.usage else None
            assert details is not None
            assert figures["num_accepted_draft_tokens"] == details.accepted_prediction_tokens
            assert figures["num_draft_tokens"] == figures["num_accepted_draft_tokens"] + (
                details.rejected_prediction_tokens or 0
            )
            assert figures["num_spec_tokens"] == 3
            assert 1 <= figures["mean_acceptance_length"] <= 4


@pytest.mark.parametrize("speculation", ["off", "on"])
async def test_logprobs_are_those_of_the_law_and_offsets_find_the_tokens(speculation: str) -> None:
    async with http_system(LAW, [TableDrafter(LAW, 0.8)]) as (client, _, _):
        answer = await client.completions.create(
            model="table",
            prompt=PROMPT,
            max_tokens=20,
            seed=5,
            temperature=0.7,
            logprobs=3,
            extra_body={"speculation": speculation},
        )
    (choice,) = answer.choices
    given = choice.logprobs
    assert given is not None
    assert given.tokens is not None
    assert given.token_logprobs is not None
    assert given.top_logprobs is not None
    assert given.text_offset is not None
    log = list(PROMPT)
    law = Law(SamplingParams(temperature=0.7, seed=5), StopConditions(4, 24), log)
    for token, logprob, top, offset in zip(
        given.tokens, given.token_logprobs, given.top_logprobs, given.text_offset, strict=True
    ):
        logits = torch.tensor(LAW.logits(log))
        expected = torch.log_softmax(logits, dim=-1)
        token_id = int(token[1:])
        assert token_id == law.draw(logits.unsqueeze(0), [()])[0]
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        best = expected.topk(3)
        assert {f"w{i}" for i in best.indices.tolist()} | {token} == top.keys()
        assert max(top.values()) == pytest.approx(float(best.values[0]), abs=1e-4)
        assert choice.text[offset:].lstrip().startswith(token)
        log.append(token_id)
        law = Law(SamplingParams(temperature=0.7, seed=5), StopConditions(4, 24), log)


async def test_logprobs_of_the_processed_law_are_those_that_were_drawn_from() -> None:
    extra = {"logprobs_of": "processed", "top_k": 2}
    async with http_system(LAW) as (client, _, _):
        answer = await client.chat.completions.create(
            model="table", messages=ASK, max_tokens=10, logprobs=True, top_logprobs=5, extra_body=extra
        )
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content is not None
    for entry in content:
        assert bytes(entry.bytes or ()) == entry.token.encode()
        chances = [math.exp(top.logprob) for top in entry.top_logprobs]
        assert sum(chances) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("streams", ["chat", "completions"])
async def test_a_stream_says_what_the_whole_says(streams: str) -> None:
    async with http_system(LAW, [TableDrafter(LAW, 0.8)]) as (client, _, _):
        fields: dict[str, Any] = {"model": "table", "seed": 9, "max_tokens": 30, "n": 2, "stop": ["w5"]}
        if streams == "chat":
            fields |= {"messages": ASK, "logprobs": True, "top_logprobs": 2}
            whole = await client.chat.completions.create(**fields)
            expected = [(choice.message.content, choice.finish_reason) for choice in whole.choices]
            entries = [choice.logprobs.content for choice in whole.choices]
            texts, reasons, streamed = ["", ""], ["", ""], [[], []]  # type: ignore[var-annotated]
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                    streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
            assert streamed == entries
        else:
            fields |= {"prompt": PROMPT, "logprobs": 2}
            short = await client.completions.create(**fields)
            expected = [(choice.text, choice.finish_reason) for choice in short.choices]
            texts, reasons, offsets = ["", ""], ["", ""], [[], []]  # type: ignore[var-annotated]
            async for part in await client.completions.create(**fields, stream=True):
                for one in part.choices:
                    texts[one.index] += one.text
                    reasons[one.index] = one.finish_reason or reasons[one.index]
                    offsets[one.index] += one.logprobs.text_offset if one.logprobs else []
            assert offsets == [choice.logprobs.text_offset for choice in short.choices]
    assert list(zip(texts, reasons, strict=True)) == expected


async def test_the_seed_of_a_choice_repeats_it_and_choices_differ() -> None:
    async with http_system(LAW) as (client, _, _):
        three = await client.chat.completions.create(model="table", messages=ASK, n=3, max_tokens=20)
        assert len({choice.message.content for choice in three.choices}) == 3
        for choice in three.choices:
            seed: Any = choice.to_dict()["seed"]
            again = await client.chat.completions.create(model="table", messages=ASK, max_tokens=20, seed=seed)
            assert again.choices[0].message.content == choice.message.content
            assert again.to_dict()["seed"] == seed


async def test_a_client_that_goes_leaves_nothing_on_the_workers() -> None:
    async with http_system(LAW, [TableDrafter(LAW, 0.8)], delay=0.01) as (client, system, _):
        stream = await client.chat.completions.create(
            model="table", messages=ASK, n=4, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        await system.idle()
