"""Every field from the SDK to worker processes and back, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from outrider import AsyncClient, Completion
from outrider.errors import InvalidRequest
from outrider.events import FinishReason
from outrider.request import GenerateOptions
from scheduler.request import GenerationRequest
from services.cli.generate import app
from specdec.params import AcceptRule, Grammar, GrammarKind, LogprobsOf, Report, SamplingParams
from specdec.seeds import choice_seed
from tools.scripted_scheduler import END_ID, ScriptedScheduler
from tools.served_gateway import served_gateway
from tools.socket_deployment import SocketDeployment

PROMPT = [3, 1, 4, 1, 5]
OPTIONS: GenerateOptions = {"token_ids": PROMPT, "max_tokens": 24, "seed": 9, "draft_length": 8, "top_logprobs": 2}


deployed = pytest.mark.asyncio(loop_scope="module")
"""For tests of `address` and `client`: in the loop of what all of them share."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """Two processes: a target, and a drafter that agrees with it about four times in five."""
    async with (
        SocketDeployment(["table_target --stop-token 63"], ["table_draft"]) as system,
        served_gateway(system.scheduler) as address,
    ):
        yield address


@pytest_asyncio.fixture(loop_scope="module")
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as client:
        yield client


def told(answer: Completion) -> object:
    return [
        (
            choice.token_ids,
            choice.text,
            [(round(one.logprob, 4), [token_id for token_id, _ in one.top]) for one in choice.logprobs],
            choice.finished.finish_reason,
            choice.finished.stop_text,
            choice.finished.completion_tokens,
        )
        for choice in answer.choices
    ]


@deployed
async def test_every_field_gives_the_plain_answer(client: AsyncClient) -> None:
    free = await client.complete(**OPTIONS)
    words = free.text.split(" ")
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "logit_bias": {free.token_ids[0]: -100.0}},
        {"bad_words": words[:3]},
        {"allowed_token_ids": [7, 8, 9]},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"typical_p": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"stop": f"{words[4]} {words[5][:2]}"},
        {"stop": [words[9]], "include_stop_str_in_output": True},
        {"n": 3, "logprobs_of": "processed"},
        {"min_tokens": 20, "stop_token_ids": list(free.token_ids[:9])},
        {"ignore_eos": True, "accept_rule": "invariant"},
    ]
    answers = []
    for more in fields:
        options = cast(GenerateOptions, {**OPTIONS, **more})
        plain = cast(GenerateOptions, {**options, "speculation": "off"})
        answer = await client.complete(**options)
        assert told(answer) == told(await client.complete(**plain))
        assert len(answer.logprobs) == len(answer.token_ids) == answer.finished.completion_tokens
        answers.append(answer)
    _, biased, bad, allowed, _, _, stopped, shown, three, _, _ = answers
    assert free.token_ids[0] not in biased.token_ids
    assert not set(words[:3]) & set(bad.text.split(" "))
    assert set(allowed.token_ids) == {7, 8, 9}
    assert (stopped.token_ids, stopped.finished.finish_reason) == (free.token_ids[:6], FinishReason.STOP)
    assert stopped.text == " ".join(words[:4]) + " "
    assert shown.text == " ".join(words[:10])
    assert shown.finished.stop_text == words[9]
    assert [choice.started.seed for choice in three.choices] == [choice_seed(9, index) for index in range(3)]
    assert len({choice.token_ids for choice in three.choices}) == 3
    assert three.token_ids == free.token_ids


@deployed
@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_other_accept_rules(client: AsyncClient, rule: Any) -> None:
    answer = await client.complete(token_ids=PROMPT, max_tokens=40, ignore_eos=True, accept_rule=rule)
    assert len(answer.token_ids) == 40
    assert answer.finished.speculation.num_accepted_tokens > 0
    with pytest.raises(InvalidRequest, match=r"^seed must be left out") as caught:
        await client.complete(token_ids=PROMPT, seed=1, accept_rule=rule)
    assert caught.value.field == "seed"


@deployed
async def test_an_echo(client: AsyncClient) -> None:
    answer = await client.complete("w3 w1 ", max_tokens=5, temperature=0, echo=True)
    plain = await client.complete("w3 w1 ", max_tokens=5, temperature=0)
    assert answer.text == "w3 w1 " + plain.text
    assert answer.finished.completion_tokens == 5


async def asked(options: dict[str, Any]) -> GenerationRequest:
    scheduler = ScriptedScheduler()
    async with served_gateway(scheduler) as address, AsyncClient(address) as client:
        await client.complete(**options)
    return scheduler.requests[0]


async def test_what_the_sdk_is_given_is_what_the_scheduler_is_asked() -> None:
    request = await asked(
        {
            "prompt": "hi",
            "typical_p": 0.5,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {9: 1.0, 5: -100.0},
            "bad_words": ["no"],
            "bad_word_ids": [[1, 2]],
            "allowed_token_ids": [97, 98],
            "top_logprobs": 0,
            "logprobs_of": "processed",
            "accept_rule": "block",
        }
    )
    assert request.sampling == SamplingParams(
        seed=request.sampling.seed,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((5, -100.0), (9, 1.0)),
        bad_words=((110, 111), (1, 2)),
        allowed_token_ids=(97, 98),
        accept_rule=AcceptRule.BLOCK,
    )
    assert request.report == Report(0, LogprobsOf.PROCESSED)


@pytest.mark.parametrize(
    ("option", "value", "grammar"),
    [
        ("json_schema", {"type": "null"}, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}')),
        ("json_schema", "{}", Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        ("json_object", True, Grammar(GrammarKind.JSON_OBJECT)),
        ("regex", "a+", Grammar(GrammarKind.REGEX, "a+")),
        ("choice", ["yes", "no"], Grammar(GrammarKind.CHOICE, '["yes", "no"]')),
        ("lark", 'start: "a"', Grammar(GrammarKind.LARK, 'start: "a"')),
    ],
)
async def test_each_kind_of_grammar_arrives(option: str, value: object, grammar: Grammar) -> None:
    assert (await asked({"prompt": "hi", option: value})).sampling.grammar == grammar


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "a", "json_object": True}, "grammar"),
        ({"accept_rule": "best"}, "accept_rule"),
        ({"logprobs_of": "cooked"}, "logprobs_of"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools"),
    ],
)
async def test_what_is_refused_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await asked({"prompt": "hi", **options})
    assert caught.value.field == field


async def test_calls_and_tools_travel_both_ways() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    scheduler = ScriptedScheduler(answer=(*text.encode(), END_ID))
    scheduler.bundles["bytes"].chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    async with served_gateway(scheduler) as address, AsyncClient(address) as client:
        answer = await client.complete(
            messages=[
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        )
    prompt = bytes(scheduler.requests[0].token_ids).decode()
    assert '{"name": "f", "arguments": {"x": 2}}' in prompt
    assert '{"name": "f", "parameters": {"type": "object"}}' in prompt
    ((name, arguments),) = [(one.name, one.arguments) for one in answer.finished.tool_calls]
    assert (name, arguments) == ("f", '{"x": 1}')


@deployed
async def test_the_command_shows_what_the_flags_ask_for(address: str) -> None:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["w3 w1", "--address", address, "--raw", "--max-tokens", "8", *arguments])

    result = await asyncio.to_thread(run, "--n", "3", "--seed", "9", "--logprobs", "2", "--json")
    choices = json.loads(result.stdout)["choices"]
    assert [choice["seed"] for choice in choices] == [choice_seed(9, index) for index in range(3)]
    assert all(len(choice["logprobs"]) == len(choice["token_ids"]) == 8 for choice in choices)
    assert all(len(token["top"]) == 2 for choice in choices for token in choice["logprobs"])
    second = choices[1]["text"].split(" ")
    flags = ("--seed", str(choices[1]["seed"]), "--stop", second[3], "--logprobs", "0")
    result = await asyncio.to_thread(run, *flags)
    assert result.stdout == f"{second[0]} {second[1]} {second[2]} \n"
    assert f"stopped by '{second[3]}', seed {choices[1]['seed']}" in result.stderr
    assert result.stderr.count("'") >= 2 * 4
    result = await asyncio.to_thread(run, "--n", "2", "--seed", "9", "--echo")
    assert result.stdout.splitlines() == ["w3 w1" + choice["text"] for choice in choices[:2]]
    assert "choice 1:" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json-schema", "/nowhere/schema.json"], "json_schema: cannot read /nowhere/schema.json"),
        (["--logit-bias", "five"], "must be ID=BIAS"),
        (["--compare", "--n", "2"], "n is 2, must be left out with --compare"),
        (["--compare", "--accept-rule", "block"], "accept_rule is block, must be invariant with --compare"),
        (["--typical-p", "2"], "typical_p is 2, must be in"),
    ],
)
def test_wrong_use_of_the_command_is_told_in_a_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["hi", *arguments])
    assert message in str(result.exception)
