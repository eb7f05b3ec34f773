"""Tool calls are found in the answer however it is cut into pieces, and nothing that the model said is lost."""

from __future__ import annotations

import json
from itertools import count

import pytest

from services.generation import ToolCall
from services.tools import Content, ToolCallParser, ToolEvent, parse_tool_calls, takes_tools, writes_tool_calls

ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2.5]}}\n</tool_call>'


def parse(text: str, size: int) -> list[ToolEvent]:
    """In pieces of `size` characters, neighbouring contents joined."""
    numbers = count()
    parser = ToolCallParser(lambda: f"call-{next(numbers)}")
    events: list[ToolEvent] = []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for event in [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]:
        if isinstance(event, Content) and events and isinstance(events[-1], Content):
            events[-1] = Content(events[-1].text + event.text)
        else:
            events.append(event)
    return events


def rome(number: int = 0) -> ToolCall:
    return ToolCall(f"call-{number}", "weather", '{"city": "Rome"}')


def oslo(number: int) -> ToolCall:
    return ToolCall(f"call-{number}", "weather", '{"city": "Oslo", "days": [1, 2.5]}')


CASES: dict[str, tuple[str, list[ToolEvent]]] = {
    "one": (ROME, [rome()]),
    "text before": ("I will look.\n" + ROME, [Content("I will look."), rome()]),
    "two": (f"{ROME}\n{OSLO}", [rome(), oslo(1)]),
    "text behind": (f"{ROME}\nThat is all.", [rome(), Content("That is all.")]),
    "blanks behind": (f"{ROME}\n\n", [rome()]),
    "no call": ("2 < 3 and <tool> and <tool_cal\n", [Content("2 < 3 and <tool> and <tool_cal\n")]),
    "cut end mark": (ROME.removesuffix("_call>"), [rome()]),
    "no end mark": (ROME.removesuffix("</tool_call>"), [rome()]),
    "half a call": ('<tool_call>\n{"name": "we', [Content('<tool_call>\n{"name": "we')]),
    "no JSON": ("<tool_call>rain?</tool_call>", [Content("<tool_call>rain?</tool_call>")]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', [Content('<tool_call>{"arguments": {}}</tool_call>')]),
    "no number": (
        '<tool_call>{"name": "a", "arguments": [NaN]}</tool_call>',
        [Content('<tool_call>{"name": "a", "arguments": [NaN]}</tool_call>')],
    ),
    "too large a number": (
        '<tool_call>{"name": "a", "arguments": [1e999]}</tool_call>',
        [Content('<tool_call>{"name": "a", "arguments": [1e999]}</tool_call>')],
    ),
    "arguments as text": ('<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', [ToolCall("call-0", "a", "{}")]),
    "no arguments": ('<tool_call>{"name": "a"}</tool_call>', [ToolCall("call-0", "a", "{}")]),
    "a bad one, then a good one": (
        f"<tool_call>rain?</tool_call>\n{ROME}",
        [Content("<tool_call>rain?</tool_call>"), rome()],
    ),
    "empty": ("", []),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_calls_are_found_in_pieces_of_any_size(text: str, expected: list[ToolEvent], size: int) -> None:
    assert parse(text, size) == expected


def test_text_that_cannot_begin_a_call_is_told_at_once() -> None:
    parser = ToolCallParser()
    assert parser.push("Hello <") == [Content("Hello")]
    assert parser.push("b> you") == [Content(" <b> you")]


def test_a_whole_answer_gives_text_calls_and_distinct_ids() -> None:
    content, calls = parse_tool_calls(f"Two.\n{ROME}\n{OSLO}")
    assert content == "Two."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    assert len({call.id for call in calls}) == 2


def test_the_template_tells_whether_a_model_takes_tools_and_how_it_calls_them() -> None:
    assert writes_tool_calls("{% if tools %}... within <tool_call></tool_call> ...{% endif %}")
    assert not writes_tool_calls("{% for message in messages %}{% endfor %}")
    assert not writes_tool_calls(None)
    assert takes_tools("{% if tools %}call them somehow{% endif %}")
    assert not writes_tool_calls("{% if tools %}call them somehow{% endif %}")
