"""A choice of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable

from services.generation import ChoiceFinished, TextTokens
from services.http.choice import Choice
from services.http.token_text import Json, TokenText, finite


class CompletionChoice(Choice):
    """tokens: how tokens are shown; None: no logprobs were asked for."""

    def __init__(self, index: int, tokens: TokenText | None) -> None:
        super().__init__(index)
        self._tokens = tokens
        self._text = ""
        self._entries: list[Json] = []

    def add(self, event: TextTokens) -> list[Json]:
        entries = self._read(event)
        self._text += event.text
        self._entries += entries
        if not event.text and not entries:
            return []
        return [self._part(event.text, entries, {"finish_reason": None})]

    def finish(self, event: ChoiceFinished) -> list[Json]:
        self.finished = event
        return [self._part("", [], self.ending(event, event.finish_reason.value))]

    def whole(self) -> Json:
        ending = {} if self.finished is None else self.ending(self.finished, self.finished.finish_reason.value)
        return self._part(self._text, self._entries, ending)

    def _part(self, text: str, entries: list[Json], ending: Json) -> Json:
        logprobs = None if self._tokens is None or (not entries and not text) else _columns(entries)
        return {"index": self.index, "text": text, "logprobs": logprobs, **ending}

    def _read(self, event: TextTokens) -> list[Json]:
        """One entry per token. text_offset: where its text begins in that of the whole choice."""
        if self._tokens is None:
            return []
        entries, offset = [], len(self._text)
        for token_id, piece, logprobs in zip(event.token_ids, event.pieces, event.logprobs, strict=True):
            top = [*logprobs.top, (token_id, logprobs.logprob)]
            entries.append(
                {
                    "tokens": self._tokens.name(token_id),
                    "token_logprobs": finite(logprobs.logprob),
                    "top_logprobs": {self._tokens.name(other): finite(logprob) for other, logprob in top},
                    "text_offset": offset,
                }
            )
            offset += len(piece)
        return entries


def _columns(entries: Iterable[Json]) -> Json:
    rows = list(entries)
    return {key: [row[key] for row in rows] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
