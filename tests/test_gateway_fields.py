"""Every field of a request: refused by name where it cannot be honoured, and honoured else, under speculation too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from scheduler.errors import InvalidRequest
from scheduler.request import GenerationRequest, Speculation
from services.gateway import Gateway
from services.generation import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt, Tool, ToolCall, UserRequest
from specdec.grammar import InvalidGrammar
from specdec.law import Law
from specdec.params import AcceptRule, Grammar, GrammarKind, LogprobsOf, Report, SamplingParams, StopConditions
from tools.continuations import LawContinuation
from tools.deployment import Deployment, quick_config
from tools.letters import Bundled, TextAnswer, ask, letters_bundle, text_of
from tools.scripted import ScriptedDrafter, oracle
from tools.scripted_scheduler import END_ID, ScriptedScheduler, bytes_bundle
from tools.table_drafter import TableDrafter
from tools.table_law import TableLaw
from tools.table_model import TableModel

HELLO = UserRequest(TextPrompt("say hello"))
GRAMMAR = Grammar(GrammarKind.REGEX, "[ab]+")
CHAT = ChatPrompt((ChatMessage("user", "hi"),))
NAN, HALF = float("nan"), "half \ud83d"

OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("typical_p", {"typical_p": 0.0}),
    ("typical_p", {"typical_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 1e-30}),
    ("repetition_penalty", {"repetition_penalty": 101.0}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": NAN}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("logit_bias", {"logit_bias": ((5, 100.5),)}),
    ("logit_bias", {"logit_bias": ((5, NAN),)}),
    ("logit_bias", {"logit_bias": ((257, 1.0),)}),
    ("logit_bias", {"logit_bias": ((5, 1.0), (5, 2.0))}),
    ("bad_words", {"bad_words": ("",)}),
    ("bad_words", {"bad_words": (" ",)}),
    ("bad_words", {"bad_words": (HALF,)}),
    ("bad_words", {"bad_words": ("x" * 257,)}),
    ("bad_words", {"bad_words": ("x",) * 257}),
    ("bad_word_ids", {"bad_word_ids": ((),)}),
    ("bad_word_ids", {"bad_word_ids": ((1, 257),)}),
    ("allowed_token_ids", {"allowed_token_ids": (257,)}),
    ("allowed_token_ids", {"allowed_token_ids": (-1,)}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": (HALF,)}),
    ("stop", {"stop": ("x" * 257,)}),
    ("stop", {"stop": ("x",) * 17}),
    ("top_logprobs", {"top_logprobs": -1}),
    ("top_logprobs", {"top_logprobs": 129}),
    ("request_id", {"request_id": HALF}),
    ("grammar", {"grammar": Grammar(GrammarKind.REGEX, HALF)}),
    ("grammar", {"grammar": Grammar(GrammarKind.REGEX, "x" * (2**18 + 1))}),
]
CANNOT_BE_HONOURED: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"seed": 1, "accept_rule": AcceptRule.REJECTION}),
    ("seed", {"seed": 0, "accept_rule": AcceptRule.BLOCK}),
    ("echo", {"echo": True, "top_logprobs": 0}),
    ("echo", {"echo": True, "prompt": CHAT}),
    ("ignore_eos", {"ignore_eos": True, "grammar": GRAMMAR}),
    ("min_tokens", {"min_tokens": 1, "grammar": GRAMMAR}),
    ("bad_words", {"bad_words": ("a",), "grammar": GRAMMAR}),
    ("bad_word_ids", {"bad_word_ids": ((97,),), "grammar": GRAMMAR}),
    ("allowed_token_ids", {"allowed_token_ids": (97,), "grammar": GRAMMAR}),
    ("allowed_token_ids", {"allowed_token_ids": (97,), "bad_words": ("a",)}),
    ("allowed_token_ids", {"allowed_token_ids": (97, 98), "bad_words": ("a", "ab")}),
    ("allowed_token_ids", {"allowed_token_ids": (END_ID,), "min_tokens": 1}),
    ("tools", {"prompt": ChatPrompt(CHAT.messages, (Tool("f"),))}),
]


@pytest.mark.parametrize(("field", "fields"), [*OUT_OF_RANGE, *CANNOT_BE_HONOURED])
async def test_what_cannot_be_honoured_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    scheduler = ScriptedScheduler()
    with pytest.raises(InvalidRequest) as caught:
        await ask(Gateway(scheduler), replace(HELLO, **fields))
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert "must" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert scheduler.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "accept_rule": AcceptRule.REJECTION},
        {"seed": 1, "accept_rule": AcceptRule.INVARIANT},
        {"n": 128, "temperature": 0.0},
        {"stop": ("x" * 256,) * 16, "top_logprobs": 128},
        {"grammar": GRAMMAR, "logit_bias": ((5, -100.0),), "stop": ("b",)},
        {"allowed_token_ids": (97, 98), "bad_words": ("a", "aa")},
    ],
)
async def test_the_ends_of_the_ranges_are_allowed(fields: dict[str, Any]) -> None:
    scheduler = ScriptedScheduler()
    async for _ in Gateway(scheduler).generate(replace(HELLO, **fields)):
        pass
    assert len(scheduler.requests) == fields.get("n", 1)


async def asked(gateway: Gateway, scheduler: ScriptedScheduler, request: UserRequest) -> GenerationRequest:
    await ask(gateway, request)
    return scheduler.requests[-1]


async def test_every_field_reaches_the_scheduler_with_its_default_resolved() -> None:
    scheduler = ScriptedScheduler()
    gateway = Gateway(scheduler)
    free = await asked(gateway, scheduler, HELLO)
    assert replace(free.sampling, seed=0) == SamplingParams()
    assert (free.report, free.watcher) == (Report(), None)
    request = replace(
        HELLO,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((9, 1.0), (5, -100.0)),
        bad_words=("no", " way"),
        allowed_token_ids=(98, 97, 98),
        top_logprobs=3,
        logprobs_of=LogprobsOf.PROCESSED,
        accept_rule=AcceptRule.BLOCK,
    )
    full = await asked(gateway, scheduler, request)
    assert replace(full.sampling, seed=0) == SamplingParams(
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((5, -100.0), (9, 1.0)),
        bad_words=(tuple(b"no"), tuple(b"way")),  # " no" ends with it, so one sequence forbids both
        allowed_token_ids=(97, 98),
        accept_rule=AcceptRule.BLOCK,
    )
    assert full.report == Report(3, LogprobsOf.PROCESSED)
    limited = await asked(gateway, scheduler, replace(HELLO, grammar=GRAMMAR, stop=("x",)))
    assert limited.sampling.grammar == GRAMMAR
    assert limited.watcher is not None


async def test_a_request_that_names_no_accept_rule_has_the_deployments() -> None:
    scheduler = ScriptedScheduler()
    gateway = Gateway(scheduler, AcceptRule.REJECTION)
    assert (await asked(gateway, scheduler, HELLO)).sampling.accept_rule is AcceptRule.REJECTION
    own = replace(HELLO, accept_rule=AcceptRule.INVARIANT, seed=4)
    assert (await asked(gateway, scheduler, own)).sampling.accept_rule is AcceptRule.INVARIANT
    with pytest.raises(InvalidRequest, match=r"^seed must be left out with accept_rule rejection"):
        await ask(gateway, replace(HELLO, seed=4))


async def test_a_grammar_is_checked_before_anything_is_opened() -> None:
    def check(grammar: Grammar) -> None:
        raise InvalidGrammar(f"{grammar.text} is open at character 5")

    scheduler = ScriptedScheduler()
    with pytest.raises(InvalidRequest, match=r"^grammar: \[ab\]\+ is open at character 5") as caught:
        await ask(Gateway(scheduler, check_grammar=check), replace(HELLO, grammar=GRAMMAR))
    assert caught.value.field == "grammar"
    assert scheduler.requests == []


async def test_tools_and_calls_go_through_the_template_and_calls_are_parsed() -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    text = 'so <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    scheduler = ScriptedScheduler(answer=(*text.encode(), END_ID), bundles={"bytes": bytes_bundle(template=template)})
    messages = (
        ChatMessage("assistant", "", (ToolCall("c1", "f", '{"x": 2}'),)),
        ChatMessage("tool", "4", tool_call_id="c1", name="f"),
    )
    tool = Tool("f", "squares", '{"type": "object"}')
    answer = await ask(Gateway(scheduler), UserRequest(ChatPrompt(messages, (tool,))))
    prompt = bytes(scheduler.requests[0].token_ids).decode()
    assert '{"name": "f", "description": "squares", "parameters": {"type": "object"}}' in prompt
    assert '"function": {"name": "f", "arguments": {"x": 2}}' in prompt
    assert '"tool_call_id": "c1", "name": "f"' in prompt
    assert answer.finished is not None
    (call,) = answer.finished.tool_calls
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls\[0\].arguments is no JSON"):
        await ask(
            Gateway(scheduler), UserRequest(ChatPrompt((ChatMessage("assistant", "", (ToolCall("c", "f", "{"),)),)))
        )


LAW = TableLaw(order=2)
PROMPT = TokenPrompt((3, 1, 4, 1, 5))
GREEDY = UserRequest(PROMPT, max_tokens=40, temperature=0.0, draft_length=8)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    drafter = ScriptedDrafter(oracle, LawContinuation(LAW))
    async with Deployment([TableModel(LAW)], [drafter], quick_config(8)) as system:
        yield Gateway(Bundled(system.scheduler, letters_bundle()))


async def both(gateway: Gateway, request: UserRequest) -> TextAnswer:
    """With speculation, in which everything was accepted, and plainly: the same is told."""
    answer = await ask(gateway, request)
    plain = await ask(gateway, replace(request, speculation=Speculation.OFF))
    assert answer.told == plain.told
    assert answer.finished is not None
    assert answer.finished.speculation.num_accepted_tokens > len(answer.token_ids) // 2
    return answer


async def test_a_bias_of_minus_100_forbids_the_most_likely_token(gateway: Gateway) -> None:
    free = await both(gateway, GREEDY)
    for token_id in set(free.token_ids):
        answer = await both(gateway, replace(GREEDY, logit_bias=((token_id, -100.0),)))
        assert token_id not in answer.token_ids
    answer = await both(gateway, replace(SAMPLED, logit_bias=((7, 100.0),)))
    assert set(answer.token_ids) == {7}


async def test_bad_words_never_appear(gateway: Gateway) -> None:
    """Both tokens of "ab" may appear, but not so."""
    letters = replace(SAMPLED, temperature=4.0, allowed_token_ids=(0, 1, 2))
    assert "ab" in (await both(gateway, letters)).text
    answer = await both(gateway, replace(letters, bad_words=("ab", "cc")))
    assert "ab" not in answer.text
    assert "cc" not in answer.text
    assert set(answer.token_ids) == {0, 1, 2}


async def test_a_bad_word_is_bad_at_the_start_of_a_text_and_behind_a_blank() -> None:
    bundle = await ScriptedScheduler().tokenizer("bytes")
    content = json.loads(bundle.tokenizer_json)
    content["model"]["vocab"]["\u0120no"] = 300
    content["model"]["vocab"]["no"], content["model"]["vocab"]["\u0120n"] = 301, 302
    content["model"]["merges"] = [["n", "o"], ["\u0120", "no"]]
    bundle = replace(bundle, tokenizer_json=json.dumps(content).encode(), vocabulary_size=303)
    scheduler = ScriptedScheduler(bundles={"bytes": bundle})
    request = await asked(Gateway(scheduler), scheduler, replace(HELLO, bad_words=("no", " no", "not")))
    assert request.sampling.bad_words == ((301,), (300,), (301, ord("t")), (300, ord("t")))


async def test_only_allowed_tokens_are_drawn(gateway: Gateway) -> None:
    answer = await both(gateway, replace(SAMPLED, allowed_token_ids=(3, 9, 27)))
    assert set(answer.token_ids) == {3, 9, 27}


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"typical_p": 0.3},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.7},
    ],
)
async def test_each_field_of_the_law_changes_the_answer_in_the_same_way_with_and_without_drafts(
    gateway: Gateway, fields: dict[str, Any]
) -> None:
    free, answer = await both(gateway, SAMPLED), await both(gateway, replace(SAMPLED, **fields))
    assert answer.token_ids != free.token_ids


@pytest.mark.parametrize("law", [LogprobsOf.RAW, LogprobsOf.PROCESSED])
async def test_logprobs_are_those_of_the_law_that_was_asked_for(gateway: Gateway, law: LogprobsOf) -> None:
    request = replace(SAMPLED, temperature=0.5, top_k=7, top_logprobs=9, logprobs_of=law)
    answer = await both(gateway, request)
    sampling = SamplingParams(temperature=0.5, top_k=7)
    log = list(PROMPT.token_ids)
    for token_id, told in zip(answer.token_ids, answer.logprobs, strict=True):
        logits = torch.tensor(LAW.logits(log)).unsqueeze(0)
        if law is LogprobsOf.RAW:
            table = torch.log_softmax(logits[0], dim=-1)
        else:
            table = torch.log(Law(sampling, StopConditions(5, 512), log).probs(logits, [()])[0])
        assert told.logprob == pytest.approx(float(table[token_id]), abs=1e-4)
        assert len(told.top) == (9 if law is LogprobsOf.RAW else 7)
        for other, logprob in told.top:
            assert logprob == pytest.approx(float(table[other]), abs=1e-4)
        log.append(token_id)


async def test_an_echoed_prompt_comes_first_and_counts_as_no_token(gateway: Gateway) -> None:
    free, answer = await both(gateway, SAMPLED), await both(gateway, replace(SAMPLED, echo=True))
    assert answer.echo == text_of(PROMPT.token_ids)
    assert answer.told == free.told
    text = await ask(Gateway(ScriptedScheduler()), replace(HELLO, echo=True))
    assert (text.echo, text.text) == ("say hello", "hello")


@pytest.mark.parametrize("rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
async def test_other_accept_rules_are_served_and_their_seed_is_told(rule: AcceptRule) -> None:
    async with Deployment([TableModel(LAW)], [TableDrafter(LAW, 0.8)], quick_config(4)) as system:
        gateway = Gateway(Bundled(system.scheduler, letters_bundle()))
        answers = [await ask(gateway, replace(SAMPLED, seed=None, accept_rule=rule)) for _ in range(4)]
    assert len({answer.started.seed for answer in answers}) == 4
    for answer in answers:
        assert answer.finished is not None
        assert len(answer.token_ids) == 40
        assert answer.finished.speculation.num_accepted_tokens > 0


async def test_the_next_turn_of_a_chat_finds_the_first_ones_prefix() -> None:
    async with Deployment([TableModel(LAW)], [ScriptedDrafter(oracle, LawContinuation(LAW))]) as system:
        bundle = await system.scheduler.tokenizer("")
        template = "{% for m in messages %}{{ m.content }} {% endfor %}"
        gateway = Gateway(Bundled(system.scheduler, replace(bundle, chat_template=template)))
        messages = [ChatMessage("user", " ".join(f"w{i}" for i in range(30)))]
        tokens = 0
        for _ in range(3):
            before = system.targets[0].worker.load().prefix_hit_tokens
            answer = await ask(gateway, UserRequest(ChatPrompt(tuple(messages)), max_tokens=20, temperature=0.0))
            hit = system.targets[0].worker.load().prefix_hit_tokens - before
            assert hit >= tokens - 8  # all but the last two blocks
            assert answer.finished is not None
            tokens = answer.finished.prompt_tokens + answer.finished.completion_tokens
            messages += [ChatMessage("assistant", answer.text), ChatMessage("user", "w7 w8")]
    assert tokens == 30 + 20 * 3 + 2 * 2
