"""Tool calls in what a model writes, in the form of the Qwen2.5 family:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

A model is known to write them by its chat template, which has to tell it so. What looks like a call and is none stays
text: nothing that the model said is dropped.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from services.generation import ToolCall
from services.tokenizer import Tokenizer

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer that belongs to no call."""

    text: str


ToolEvent = Content | ToolCall


def writes_tool_calls(chat_template: str | None) -> bool:
    """Whether a model with this template is told to write calls in the form that is parsed here."""
    return chat_template is not None and takes_tools(chat_template) and OPEN in chat_template


def takes_tools(chat_template: str) -> bool:
    """Whether the template shows tool definitions to the model at all."""
    return "tools" in chat_template


def marks_are_tokens(tokenizer: Tokenizer) -> bool:
    """Whether each mark is one token, which a model was taught to write instead of its letters."""
    return all(len(tokenizer.encode(mark, add_special_tokens=False)) == 1 for mark in (OPEN, CLOSE))


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text around the calls, and the calls, of a whole answer."""
    parser = ToolCallParser()
    events = [*parser.push(text), *parser.finish()]
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content, tuple(event for event in events if isinstance(event, ToolCall))


class ToolCallParser:
    """Of one streamed answer: `push` its text as it comes, then `finish` once.

    Text is told as soon as it is certain that it does not begin a call; a call when it is complete. Blanks beside a
    call are dropped with it.
    """

    def __init__(self, new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}") -> None:
        self._new_id = new_id
        self._held = ""
        self._inside = False
        self._after_call = False

    def push(self, text: str) -> list[ToolEvent]:
        self._held += text
        events: list[ToolEvent] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            events += self._call(before) if self._inside else self._content(before.rstrip())
            self._inside = not self._inside
            self._held = after
        if not self._inside:
            certain = len(self._held) - _undecided(self._held)
            events += self._content(self._held[:certain])
            self._held = self._held[certain:]
        return events

    def finish(self) -> list[ToolEvent]:
        """The answer has ended. A call that lacks nothing but its end mark counts: a stop may have cut that off."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", False
        if inside:
            cut = held[: len(held) - _overlap(held, CLOSE)]
            return self._call(cut) if _read(cut) is not None else self._content(OPEN + held)
        if self._after_call and not held.strip():
            return []
        return self._content(held)

    def _content(self, text: str) -> list[ToolEvent]:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [Content(text)]

    def _call(self, body: str) -> list[ToolEvent]:
        read = _read(body)
        if read is None:
            return self._content(OPEN + body + CLOSE)
        self._after_call = True
        return [ToolCall(self._new_id(), *read)]


def _undecided(text: str) -> int:
    """Characters at the end of `text` that may belong to a call: blanks, and the beginning of its mark."""
    overlap = _overlap(text, OPEN)
    return len(text) - len(text[: len(text) - overlap].rstrip())


def _overlap(text: str, mark: str) -> int:
    """The longest end of `text` that begins `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


def _read(body: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call; None if it is none."""
    try:
        call: Any = json.loads(body, parse_constant=_refuse)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            return call["name"], arguments
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
