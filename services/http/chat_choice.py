"""A choice of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from services.generation import ChoiceFinished, ChoiceStarted, TextTokens, ToolCall
from services.http.choice import Choice
from services.http.token_text import Json, TokenText
from services.tools import Content, ToolCallParser, ToolEvent
from specdec.commit import FinishReason


class ChatChoice(Choice):
    """tokens: how tokens are shown; None: no logprobs were asked for. has_tools: calls are looked for."""

    def __init__(self, index: int, tokens: TokenText | None, has_tools: bool) -> None:
        super().__init__(index)
        self._tokens = tokens
        self._parser = ToolCallParser() if has_tools else None
        self._content = ""
        self._calls: list[ToolCall] = []
        self._entries: list[Json] = []

    def start(self, event: ChoiceStarted) -> list[Json]:
        super().start(event)
        return [self._chunk({"role": "assistant", "content": ""})]

    def add(self, event: TextTokens) -> list[Json]:
        entries = self._read(event)
        self._entries += entries
        parser = self._parser
        deltas = self._deltas([Content(event.text)] if parser is None else parser.push(event.text))
        if entries and not deltas:
            deltas = [{"content": ""}]
        return [self._chunk(delta, entries if place == 0 else ()) for place, delta in enumerate(deltas)]

    def finish(self, event: ChoiceFinished) -> list[Json]:
        self.finished = event
        rest = [self._chunk(delta) for delta in self._deltas([] if self._parser is None else self._parser.finish())]
        return [*rest, self._chunk({}) | self.ending(event, self._reason(event))]

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = [_call(call) for call in self._calls]
        ending = {} if self.finished is None else self.ending(self.finished, self._reason(self.finished))
        return {"index": self.index, "message": message, "logprobs": self._logprobs(self._entries), **ending}

    def _deltas(self, found: Sequence[ToolEvent]) -> list[Json]:
        """Notes what was found."""
        deltas: list[Json] = []
        for event in found:
            if isinstance(event, ToolCall):
                deltas.append({"tool_calls": [{"index": len(self._calls), **_call(event)}]})
                self._calls.append(event)
            elif event.text:
                deltas.append({"content": event.text})
                self._content += event.text
        return deltas

    def _reason(self, event: ChoiceFinished) -> str:
        called = bool(self._calls) and event.finish_reason is FinishReason.STOP
        return "tool_calls" if called else event.finish_reason.value

    def _chunk(self, delta: Json, entries: Sequence[Json] = ()) -> Json:
        logprobs = self._logprobs(list(entries)) if entries else None
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, entries: list[Json]) -> Json | None:
        return None if self._tokens is None else {"content": entries, "refusal": None}

    def _read(self, event: TextTokens) -> list[Json]:
        if self._tokens is None:
            return []
        pairs = zip(event.token_ids, event.logprobs, strict=True)
        return [self._tokens.chat_entry(token_id, logprobs) for token_id, logprobs in pairs]


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
