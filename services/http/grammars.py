"""What the answer has to match, from the many ways in which clients say it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.http.bodies import GenerationBody, ResponseFormat
from services.http.chat_body import ToolDefinition
from services.http.errors import bad_request
from services.tools import CLOSE, OPEN
from specdec.params import Grammar, GrammarKind

ANY_OBJECT = {"type": "object"}


def grammar_of(body: GenerationBody, call: Grammar | None = None) -> tuple[str, Grammar] | None:
    """The field that asks for it, and the grammar; None if the answer is free. call: that of a call which must be made.

    Raises HttpError if there are two.
    """
    found = [*_response_format(body.response_format), *_guided(body), *_structured_outputs(body)]
    if call is not None:
        found.append(("tool_choice", call))
    if len(found) > 1:
        raise bad_request(found[1][0], f"{found[1][0]} and {found[0][0]} both say what the answer must match: give one")
    return found[0] if found else None


def tool_call_grammar(tools: Sequence[ToolDefinition], parallel: bool, marks_are_tokens: bool) -> Grammar:
    """One call of one of the tools, or several in parallel.

    marks_are_tokens: the vocabulary has one token for each mark around a call, which a grammar has to name as such.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": ANY_OBJECT if tool.function.parameters is None else tool.function.parameters,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    opened, closed = (OPEN, CLOSE) if marks_are_tokens else (json.dumps(OPEN), json.dumps(CLOSE))
    more = '("\\n" call)*' if parallel else ""
    lines = (
        f"start: call {more}".rstrip(),
        f'call: {opened} "\\n" object "\\n" {closed}',
        f"object: %json {json.dumps(schema)}",
    )
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


Found = list[tuple[str, Grammar]]


def _response_format(wanted: ResponseFormat | None) -> Found:
    if wanted is None:
        return []
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise bad_request("response_format.json_schema", "response_format.json_schema: schema is required")
        return [("response_format", _json(wanted.json_schema.schema_))]
    if wanted.json_schema is not None:
        raise bad_request("response_format.json_schema", f"json_schema does not belong to type {wanted.type}")
    return [("response_format", Grammar(GrammarKind.JSON_OBJECT))] if wanted.type == "json_object" else []


def _guided(body: GenerationBody) -> Found:
    found: Found = []
    if body.guided_json is not None:
        found.append(("guided_json", _json(body.guided_json)))
    if body.guided_regex is not None:
        found.append(("guided_regex", Grammar(GrammarKind.REGEX, body.guided_regex)))
    if body.guided_choice is not None:
        found.append(("guided_choice", _choice("guided_choice", body.guided_choice)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", Grammar(GrammarKind.LARK, body.guided_grammar)))
    return found


def _structured_outputs(body: GenerationBody) -> Found:
    wanted, found = body.structured_outputs, list[tuple[str, Grammar]]()
    if wanted is None:
        return found
    field = "structured_outputs"
    if wanted.json_ is not None:
        found.append((f"{field}.json", _json(wanted.json_)))
    if wanted.regex is not None:
        found.append((f"{field}.regex", Grammar(GrammarKind.REGEX, wanted.regex)))
    if wanted.choice is not None:
        found.append((f"{field}.choice", _choice(f"{field}.choice", wanted.choice)))
    if wanted.grammar is not None:
        found.append((f"{field}.grammar", Grammar(GrammarKind.LARK, wanted.grammar)))
    if wanted.json_object:
        found.append((f"{field}.json_object", Grammar(GrammarKind.JSON_OBJECT)))
    return found


def _json(schema: dict[str, Any] | str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def _choice(field: str, texts: list[str]) -> Grammar:
    if not texts:
        raise bad_request(field, f"{field} is empty, must hold at least one text")
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))
