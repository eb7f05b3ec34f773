"""Kind 10, and number 117 of kind 24: a grammar holds whatever is drafted, and whatever becomes of the workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import jsonschema
import pytest

from scheduler.errors import InvalidRequest, SequenceFailed
from scheduler.request import Finished, GenerationRequest, Started, Tokens
from specdec.candidates import CandidateTree
from specdec.commit import FinishReason
from specdec.drafter import Drafter
from specdec.messages import TargetOpen
from specdec.params import AcceptRule, Grammar, GrammarKind, SamplingParams
from tools.cases import check_all, consistent, total
from tools.continuations import LawContinuation
from tools.deployment import Answer, Deployment, quick_config
from tools.grammar_system import LAW, SCHEMAS, GrammarDeployment, MaskedContinuation, table_model
from tools.grammar_vocabulary import STOP, SYSTEM, VOCABULARY, schema, spelled, text_of, token_id
from tools.scripted import RandomTree, Script, ScriptedDrafter, WrongFrom, oracle
from tools.table_drafter import TableDrafter

ANTI = WrongFrom(0, VOCABULARY)


def _request(name: str, seed: int, **changes: object) -> GenerationRequest:
    """Prompts hold JSON of their own, which the grammar must not count."""
    sampling = SamplingParams(temperature=(0.7, 1.0)[seed % 2], seed=seed, grammar=schema(SCHEMAS[name]))
    request = GenerationRequest(tuple(spelled('{"a') * (seed % 3 + 1)), sampling, stop_token_ids=frozenset({STOP}))
    return replace(request, **changes)  # type: ignore[arg-type]


def _check(name: str, answer: Answer) -> None:
    """It ended by itself, and what came is JSON of the schema."""
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] == STOP
    assert STOP not in answer.token_ids[:-1]
    assert answer.finished is not None
    assert consistent(answer.finished)
    jsonschema.validate(json.loads(text_of(answer.token_ids)), SCHEMAS[name])


def _drafter(script: Script = oracle) -> ScriptedDrafter:
    return ScriptedDrafter(script, MaskedContinuation())


async def test_kind10_200_schema_requests_half_of_them_with_the_anti_drafter() -> None:
    """Number 58: 30 at a time and more."""
    names = [list(SCHEMAS)[i % len(SCHEMAS)] for i in range(200)]
    forbidden = 0
    halves: list[tuple[range, Script]] = [(range(100), oracle), (range(100, 200), ANTI)]
    for half, script in halves:
        async with GrammarDeployment([table_model()], [_drafter(script)], quick_config(5)) as system:
            answers = await asyncio.gather(*(system.generate(_request(names[i], i)) for i in half))
            for i, answer in zip(half, answers, strict=True):
                _check(names[i], answer)
            figures = total(answers)
            if script is oracle:
                assert figures.num_accepted_tokens > 0.9 * figures.num_draft_tokens
            else:
                assert figures.num_accepted_tokens < 0.1 * figures.num_draft_tokens
                forbidden = system.num_forbidden
            assert not figures.fallbacks
            await system.idle()
    assert forbidden > 100


async def test_kind10_every_drafter_gives_what_plain_decoding_gives() -> None:
    drafters: list[Drafter] = [
        _drafter(),
        _drafter(ANTI),
        _drafter(WrongFrom(2, VOCABULARY)),
        _drafter(RandomTree(3, VOCABULARY)),
        ScriptedDrafter(oracle, LawContinuation(LAW)),  # it knows the model, but not the grammar
        TableDrafter(LAW, 0.7),
    ]
    requests = [(name, _request(name, seed)) for seed, name in enumerate(SCHEMAS)]
    requests += [(name, replace(r, sampling=replace(r.sampling, temperature=0.0))) for name, r in requests]
    async with GrammarDeployment([table_model()]) as alone:
        plain = await asyncio.gather(*(alone.plain(request) for _, request in requests))
    for (name, request), answer in zip(requests, plain, strict=True):
        if request.sampling.temperature or answer.finish_reason is FinishReason.STOP:
            _check(name, answer)
    for drafter in drafters:
        async with GrammarDeployment([table_model()], [drafter], quick_config(5, width=3)) as system:
            answers = await asyncio.gather(*(system.generate(request) for _, request in requests))
            assert [a.token_ids for a in answers] == [a.token_ids for a in plain], drafter
            assert [a.finish_reason for a in answers] == [a.finish_reason for a in plain]
            assert total(answers).num_drafts > 0


@pytest.mark.parametrize("rule", [AcceptRule.REJECTION, AcceptRule.BLOCK])
async def test_kind10_rules_that_test_ratios_keep_to_the_grammar(rule: AcceptRule) -> None:
    async with GrammarDeployment([table_model()], [TableDrafter(LAW, 0.7)], quick_config(5)) as system:
        names = list(SCHEMAS) * 3
        requests = [_request(name, i) for i, name in enumerate(names)]
        requests = [replace(r, sampling=replace(r.sampling, accept_rule=rule)) for r in requests]
        answers = await asyncio.gather(*(system.generate(request) for request in requests))
        for name, answer in zip(names, answers, strict=True):
            _check(name, answer)
        assert total(answers).num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar(GrammarKind.REGEX, "(ab|c){3}[0-9]"), lambda text: len(text) in range(4, 8)),
        (Grammar(GrammarKind.CHOICE, '["red", "cab", "abcab"]'), lambda text: text in ("red", "cab", "abcab")),
        (Grammar(GrammarKind.LARK, 'start: "(" start ")" | "ab"'), lambda text: text.strip("()") == "ab"),
    ],
    ids=["regex", "choice", "lark"],
)
async def test_kind10_other_kinds_of_grammar(grammar: Grammar, matches: Callable[[str], bool]) -> None:
    async with GrammarDeployment([table_model()], [_drafter(WrongFrom(1, VOCABULARY))], quick_config(5)) as system:
        for seed in range(8):
            request = _request("flat", seed, sampling=SamplingParams(seed=seed, grammar=grammar))
            answer = await system.generate(request)
            assert answer.finish_reason is FinishReason.STOP
            assert matches(text_of(answer.token_ids).decode())
            assert answer.token_ids == (await system.plain(request)).token_ids


async def test_kind10_neighbours_of_a_schema_request_are_what_they_are_alone() -> None:
    """Number 59: one schema request among 20 streams."""
    others = [
        GenerationRequest((i, i + 1), SamplingParams(0.9, seed=i), max_tokens=40, stop_token_ids=frozenset({STOP}))
        for i in range(20)
    ]
    async with GrammarDeployment([table_model()], [_drafter(ANTI)], quick_config(5)) as system:
        schema_request = asyncio.create_task(system.generate(_request("nested", 1)))
        await check_all(system, LAW, others, context_length=4096)
        _check("nested", await schema_request)


async def test_kind10_preempted_schema_requests_stay_valid() -> None:
    """Number 61: a pool that holds few of them, so that each is thrown out and prefilled again, several times."""
    model = table_model(blocks_total=32)
    requests = [(name, _request(name, seed)) for seed, name in enumerate([*SCHEMAS, "nested", "definitions"])]
    async with GrammarDeployment([table_model()]) as alone:
        plain = await asyncio.gather(*(alone.plain(request) for _, request in requests))
    truncated: list[str] = []
    truncate = model.truncate

    def noting(sequence_id: str, length: int) -> None:
        if length == 0 and model.kv_length(sequence_id):
            truncated.append(sequence_id)
        truncate(sequence_id, length)

    model.truncate = noting  # type: ignore[method-assign]
    async with GrammarDeployment([model], [_drafter(WrongFrom(2, VOCABULARY))], quick_config(5)) as system:
        answers = await asyncio.gather(*(system.generate(request) for _, request in requests))
        for (name, _), answer, reference in zip(requests, answers, plain, strict=True):
            _check(name, answer)
            assert answer.token_ids == reference.token_ids
    num_preemptions = len(truncated) - len(set(truncated))  # at its end, each is truncated once
    assert num_preemptions >= 3


@pytest.mark.parametrize("script", [oracle, ANTI], ids=["oracle", "anti"])
async def test_kind24_schema_requests_of_a_killed_target_go_on_in_the_grammar(script: Script) -> None:
    """Number 117: the next target replays the answer, and does not begin the grammar anew."""
    models = [table_model(delay=0.002), table_model(delay=0.002)]
    long = ("flat", "nested", "definitions", "array of objects", "optional", "array bounds")
    requests = [(name, _request(name, seed)) for seed, name in enumerate(long)]
    async with GrammarDeployment(models, [_drafter(script)], quick_config(3)) as system:
        plain = await asyncio.gather(*(system.plain(request) for _, request in requests))
        answers = await asyncio.gather(*(_killing_the_first_target(system, request) for _, request in requests))
        for (name, _), answer, reference in zip(requests, answers, plain, strict=True):
            _check(name, answer)
            assert answer.token_ids == reference.token_ids
        opened = [item.body for target in system.targets for item in target.items if isinstance(item.body, TargetOpen)]
        assert sum(len(body.token_ids) > body.stop.prompt_length for body in opened) >= 1


async def _killing_the_first_target(system: Deployment, request: GenerationRequest) -> Answer:
    """The stream of a request. The first target is killed as soon as it holds two that are in the middle."""
    answer: Answer | None = None
    async for event in system.scheduler.generate(request):
        match event:
            case Started():
                answer = Answer(event)
            case Tokens() if answer:
                answer.token_ids += event.token_ids
                held = [s for s in system.scheduler.sequences() if s.target_worker == system.targets[0].address]
                if sum(s.committed_length > s.prompt_length for s in held) >= 2 and system.targets[0].reachable:
                    system.targets[0].kill()
            case Finished() if answer:
                answer.finished = event
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "nope"}), "Invalid type: nope"),
        (Grammar(GrammarKind.REGEX, "a("), "unclosed group"),
        (Grammar(GrammarKind.REGEX, r"[^\s\S]"), "no text matches it"),
    ],
)
async def test_grammar_that_the_target_refuses_is_the_users_fault(grammar: Grammar, reason: str) -> None:
    async with GrammarDeployment([table_model()], [_drafter()]) as system:
        with pytest.raises(InvalidRequest, match=reason) as error:
            await system.generate(_request("flat", 0, sampling=SamplingParams(grammar=grammar)))
        assert error.value.field == "grammar"
        assert str(error.value).startswith("grammar: ")
        _check("flat", await system.generate(_request("flat", 0)))
        await system.idle()


async def test_target_without_grammars_refuses_them() -> None:
    async with Deployment([table_model()]) as system:
        with pytest.raises(InvalidRequest, match="grammar") as error:
            await system.generate(_request("flat", 0))
        assert error.value.field == "grammar"


@pytest.mark.parametrize("script", [None, oracle, ANTI], ids=["plain", "oracle", "anti"])
async def test_dead_end_ends_that_request_alone_and_cleanly(script: Script | None) -> None:
    """No token spells `Ж`: an answer that comes to need it can neither go on nor end."""
    dead = replace(_request("flat", 0), sampling=SamplingParams(seed=4, grammar=Grammar(GrammarKind.REGEX, "ababЖ")))
    drafts = [] if script is None else [_drafter(script)]
    async with GrammarDeployment([table_model()], drafts, quick_config(5)) as system:
        good = asyncio.create_task(system.generate(_request("nested", 1)))
        with pytest.raises(SequenceFailed, match=r"failed on this sequence.*the grammar leaves no token"):
            await system.generate(dead)
        _check("nested", await good)
        await system.idle()


async def test_dead_end_behind_a_candidate_harms_no_one_who_never_gets_there() -> None:
    """The drafter proposes the branch that cannot be finished; the target draws another."""
    grammar = Grammar(GrammarKind.REGEX, "(aЖ|[b-z])[b-z]{3}")
    drafter = ScriptedDrafter(lambda job, _: CandidateTree.chain(spelled("a")), MaskedContinuation())
    async with GrammarDeployment([table_model()], [drafter], quick_config(5)) as system:
        for seed in range(8):
            sampling = SamplingParams(seed=seed, grammar=grammar, logit_bias=((token_id("a"), -100.0),))
            answer = await system.generate(_request("flat", 0, sampling=sampling))
            assert answer.finish_reason is FinishReason.STOP
            assert answer.token_ids == (await system.plain(_request("flat", 0, sampling=sampling))).token_ids
            assert total([answer]).num_draft_tokens > 0


async def test_special_tokens_never_come_even_if_the_model_wants_nothing_else() -> None:
    bias = ((SYSTEM, 100.0),)
    request = _request("string lengths", 3)
    async with GrammarDeployment([table_model()], [_drafter()]) as system:
        answer = await system.generate(replace(request, sampling=replace(request.sampling, logit_bias=bias)))
        _check("string lengths", answer)
        assert SYSTEM not in answer.token_ids


async def test_answer_cut_by_its_budget_ends_in_length_and_begins_right() -> None:
    async with GrammarDeployment([table_model()], [_drafter()]) as system:
        whole = await system.generate(_request("nested", 1))
        for count in (1, 2, len(whole.token_ids) - 1):
            cut = await system.generate(_request("nested", 1, max_tokens=count))
            assert cut.token_ids == whole.token_ids[:count]
            assert cut.finish_reason is FinishReason.LENGTH
