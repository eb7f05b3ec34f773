"""Kind 10: an answer under a grammar is the plain one, whatever was drafted, and matches it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema

from outrider import AsyncClient
from services.generation import TokenPrompt, UserRequest
from specdec.grammars import Grammars
from specdec.params import Grammar, GrammarKind, LogprobsOf
from tools.characters import byte_level
from tools.lab import Lab, read, served
from tools.lab_grid import equal_everywhere
from tools.parameters import bare
from tools.table_model import TableModel

WRITER = byte_level()
LAW = WRITER.law()
INNER = {
    "type": "object",
    "properties": {"b": {"type": "boolean"}},
    "required": ["b"],
    "additionalProperties": False,
}
WORD = {"type": "string", "pattern": "^[a-z好é]{1,6}$"}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": WORD}, "required": ["name"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "好世界", {"a": None}, 12]},
    {
        "type": "object",
        "properties": {"a": INNER, "c": WORD},
        "required": ["a", "c"],
        "additionalProperties": False,
    },
    {"type": "integer", "minimum": -12, "maximum": 340},
)
REGEX = "(ab|好|🎠){2,5}[.!]"
CHOICES = ("the good", "the 好世界", "a", "👍🏽")


def make_masks() -> Grammars:
    return Grammars(WRITER.bundle.tokenizer_json, len(WRITER.pieces), [WRITER.end_id])


def grammars() -> list[Grammar]:
    schemas = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS]
    return [*schemas, Grammar(GrammarKind.REGEX, REGEX), Grammar(GrammarKind.CHOICE, json.dumps(CHOICES))]


def held(request: UserRequest, grammar: Grammar) -> UserRequest:
    """Blanks are made unlikely: this model would write them for long wherever JSON allows them."""
    blanks = tuple((blank, -40.0) for blank in b"\t\n\r ")
    return replace(request, grammar=grammar, ignore_eos=False, max_tokens=100, logit_bias=blanks)


def requests_of(first: int) -> list[UserRequest]:
    """Every grammar, greedy and drawn; some with logprobs, with penalties, and with filters."""
    requests = [
        held(bare(first + 10 * i + j, temperature), grammar)
        for i, grammar in enumerate(grammars())
        for j, temperature in enumerate((0.0, 1.0))
    ]
    requests[0] = replace(requests[0], top_logprobs=5, logprobs_of=LogprobsOf.PROCESSED)
    requests[1] = replace(requests[1], top_logprobs=5)
    requests[3] = replace(requests[3], frequency_penalty=1.0, top_p=0.9)
    return requests


def check_matches(grammar: Grammar, text: str) -> None:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
        case GrammarKind.REGEX:
            assert re.fullmatch(grammar.text, text)
        case GrammarKind.CHOICE:
            assert text in json.loads(grammar.text)


async def test_kind10_answers_under_a_grammar_are_the_plain_ones_and_match_it() -> None:
    """Numbers 58, 59 and 62, with neighbours that have no grammar."""
    requests = requests_of(500)
    neighbours = [bare(580 + i, 0.9) for i in range(3)]
    async with Lab.of(WRITER, LAW, make_masks=make_masks) as lab:
        grid = await equal_everywhere(lab, LAW, [*requests, *neighbours], known=True, share=4)
    for request, (choice,) in zip(requests, grid.plain, strict=False):
        assert request.grammar is not None
        assert choice.told.finish_reason == "stop"
        check_matches(request.grammar, choice.told.text)
    ungrammatical = await _without_grammar(requests)
    assert all(choice.told.text != text for (choice,), text in zip(grid.plain, ungrammatical, strict=False))


async def _without_grammar(requests: list[UserRequest]) -> list[str]:
    """What the same requests say without it, so that the match is no chance."""
    async with Lab.of(WRITER, LAW) as lab:
        told = await asyncio.gather(*(lab.plainly(replace(request, grammar=None)) for request in requests))
    return [one.text for one in told]


async def test_kind10_sequences_that_lose_their_kv_go_on_in_their_grammar() -> None:
    """Number 61: room for about three of fourteen, so that they are preempted in the middle."""
    requests = requests_of(600)
    model = TableModel(LAW, name=WRITER.name, context_length=160, blocks_total=60, page=4)
    roomy = TableModel(LAW, name=WRITER.name, context_length=160)
    async with Lab.of(WRITER, LAW, model=roomy, make_masks=make_masks) as lab:
        alone = [await lab.plainly(request) for request in requests]
    async with Lab.of(WRITER, LAW, model=model, make_masks=make_masks) as lab:
        grid = await equal_everywhere(lab, LAW, requests, known=True, share=9)
    assert [choice.told for (choice,) in grid.plain] == alone
    model.check_integrity()


async def test_kind10_grpc_takes_a_schema_and_refuses_what_is_none() -> None:
    (grammar, *_) = grammars()
    request = held(bare(690, 0.9), grammar)
    assert isinstance(request.prompt, TokenPrompt)
    async with Lab.of(WRITER, LAW, make_masks=make_masks) as lab:
        plain = await lab.plainly(request)
        async with served(lab.plain) as address, AsyncClient(address) as client:
            events = [
                event
                async for event in client.generate(
                    token_ids=request.prompt.token_ids,
                    max_tokens=100,
                    temperature=0.9,
                    seed=690,
                    logit_bias=dict(request.logit_bias),
                    json_schema=SCHEMAS[0],
                )
            ]
    (choice,) = read(events)
    assert choice.told.differences(plain) == []
