"""The tables of docs/api.md are those of the code: fields and where they are known, ranges, defaults, paths, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.request import GenerateOptions
from outrider.v1.generation_service_pb2 import GenerateRequest
from scheduler.errors import InvalidRequest
from services.errors import TABLE
from services.gateway import Gateway
from services.generation import TextPrompt, UserRequest
from services.http.app import make_app
from services.http.bodies import GenerationBody
from services.http.chat_body import ChatBody
from services.http.completion_body import CompletionBody
from services.validation import check_request, sampling_of
from specdec.params import AcceptRule

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text("utf-8")
CODE = re.compile(r"`([^`]+)`")
RANGE = re.compile(r"(above )?(-?[\d.]+) to (-?[\d.^]+)( - 1)?")
Row = dict[str, str]


def rows(first: str) -> Iterator[Row]:
    """Rows of the tables whose first column has this title, by column title."""
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if lines[0][0] == first:
            for cells in lines[2:]:
                assert len(cells) == len(lines[0]), cells
                yield dict(zip(lines[0], cells, strict=True))


FIELDS = {name: row for row in rows("field") for name in CODE.findall(row["field"])}


def body_fields(body: type[GenerationBody]) -> set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


KNOWN = {
    "chat": body_fields(ChatBody),
    "completions": body_fields(CompletionBody),
    "gRPC": {field.name for field in GenerateRequest.DESCRIPTOR.fields},
    "Python": set(GenerateOptions.__annotations__),
}


def test_the_tables_hold_every_field_once() -> None:
    named = [name for row in rows("field") for name in CODE.findall(row["field"])]
    assert sorted(named) == sorted(set.union(*KNOWN.values()))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_known_where_the_table_says(name: str) -> None:
    where = FIELDS[name]["where"]
    expected = set(KNOWN) if where == "all" else set(where.split(", "))
    assert {api for api, fields in KNOWN.items() if name in fields} == expected


def judge(name: str, value: float) -> None:
    """As the gateway does. Raises InvalidRequest."""
    given: Any = ((0, value),) if name == "logit_bias" else value
    request = UserRequest(TextPrompt("w1"), **{name: given})
    check_request(request, AcceptRule.INVARIANT)
    sampling_of(request, AcceptRule.INVARIANT)


RANGES = [(name, match) for name, row in FIELDS.items() if (match := RANGE.fullmatch(row.get("range", "")))]


def test_most_numbers_have_a_range() -> None:
    assert len(RANGES) >= 12


@pytest.mark.parametrize(("name", "match"), RANGES, ids=[name for name, _ in RANGES])
def test_ranges_are_those_of_the_gateway(name: str, match: re.Match[str]) -> None:
    above, low, high, less_one = match.groups()
    lowest = float(low) if "." in low else int(low)
    highest = 2 ** int(high[2:]) - 1 if less_one else int(high)
    whole = "number" if isinstance(getattr(sampling_of(UserRequest(None), AcceptRule.INVARIANT), name, 0), int) else ""
    step = 1 if whole and name != "logit_bias" else 0.001
    judge(name, highest)
    judge(name, lowest + (0.001 if above else 0))
    for outside in (lowest if above else lowest - step, highest + step):
        with pytest.raises(InvalidRequest) as refusal:
            judge(name, outside)
        assert refusal.value.field == name


def test_defaults_are_those_of_the_gateway() -> None:
    resolved = sampling_of(UserRequest(TextPrompt("w1")), AcceptRule.INVARIANT)
    numbers = {
        name: float(row["if absent"].split()[0])
        for name, row in FIELDS.items()
        if hasattr(resolved, name) and re.match(r"\d", row.get("if absent", ""))
    }
    assert len(numbers) == 8
    assert numbers == {name: getattr(resolved, name) for name in numbers}


def test_paths_are_those_of_the_server() -> None:
    app = make_app(cast(Gateway, None), render_metrics=lambda accept: (b"", ""))
    served = {path for route in app.routes if (path := getattr(route, "path", "")) != "/"}
    told = {name for row in rows("path") for name in CODE.findall(row["path"])}
    assert {path.replace("{model:path}", "{model}") for path in served} == told


def test_errors_are_those_of_the_table() -> None:
    told = {(reason, int(row["HTTP"]), row["gRPC"]) for row in rows("reason") for reason in CODE.findall(row["reason"])}
    assert told == {(kind.reason, kind.http_status, kind.code.name) for kind in TABLE.values()}


def test_accept_rules_are_those_of_the_code() -> None:
    assert [CODE.findall(row["rule"])[0] for row in rows("rule")] == [rule.value for rule in AcceptRule]
    for row in rows("rule"):
        rule = AcceptRule(CODE.findall(row["rule"])[0])
        if row["takes a seed"] == "yes":
            check_request(UserRequest(TextPrompt("w1"), seed=1), rule)
        else:
            with pytest.raises(InvalidRequest, match="seed must be left out"):
                check_request(UserRequest(TextPrompt("w1"), seed=1), rule)
