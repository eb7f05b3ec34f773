"""The text of one answer: what each committed token adds to it, and whether it ends there."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.request import Tokens
from services.detokenizer import IncrementalDetokenizer
from services.generation import TextTokens
from services.text_stops import TextStops
from specdec.commit import commit
from specdec.params import StopConditions


class AnswerText:
    """Also the scheduler's `Watcher` of the sequence, which then reads each token before the gateway is told of it.

    What is held back, inside a character or in what may yet become a stop text, belongs to the last token of the
    answer. The last one is told by the rule by which the target ends a sequence.
    """

    def __init__(
        self, index: int, detokenizer: IncrementalDetokenizer, stop: StopConditions, text_stops: TextStops
    ) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._stop = stop
        self._text_stops = text_stops
        self._length = stop.prompt_length  # of the log that was read
        self._pieces: list[str] = []  # of tokens that were read and not yet told
        self._ended = False
        self._end = 0
        self._digest = b""
        self._told: list[str] = []
        self.stop_text: str | None = None

    @property
    def told(self) -> str:
        """All of it."""
        return "".join(self._told)

    def ends_after(self, token_ids: Sequence[int]) -> int | None:
        """See `Watcher`."""
        for count, token_id in enumerate(token_ids, start=1):
            self._read_one(token_id)
            if self.stop_text is not None:
                return count
        return None

    def add(self, tokens: Tokens) -> TextTokens:
        """The event of tokens that were committed."""
        count = len(tokens.token_ids)
        if self._text_stops.none:
            pieces = tuple(self._read(tokens.token_ids))
        else:
            self.ends_after(tokens.token_ids[len(self._pieces) :])
            pieces, self._pieces = tuple(self._pieces[:count]), self._pieces[count:]
        self._end, self._digest = tokens.position + count, tokens.prefix_digest
        self._told += pieces
        return TextTokens(
            self._index,
            tokens.position,
            tokens.token_ids,
            tokens.sources,
            tokens.prefix_digest,
            "".join(pieces),
            pieces,
            tokens.logprobs,
        )

    def rest(self) -> TextTokens | None:
        """Text still held back at an end that was not foreseen, as an event without tokens."""
        text = "" if self._ended else self._flush()
        self._told.append(text)
        return TextTokens(self._index, self._end, (), (), self._digest, text, ()) if text else None

    def _read(self, token_ids: Sequence[int]) -> list[str]:
        """All of an event at once, where no text ends the answer. Returns what each token adds."""
        pieces = [self._detokenizer.push(token_id) for token_id in token_ids]
        committed = commit(self._length, token_ids, self._stop, self._stop.max_length)
        self._length += len(token_ids)
        self._ended = committed.finish_reason is not None
        if self._ended:
            pieces[-1] += self._detokenizer.flush()
        return pieces

    def _read_one(self, token_id: int) -> None:
        piece = self._detokenizer.push(token_id)
        last = commit(self._length, (token_id,), self._stop, self._stop.max_length).finish_reason is not None
        self._length += 1
        if last:
            piece += self._detokenizer.flush()
        told = self._text_stops.push(piece, armed=self._length > self._stop.min_length)
        self.stop_text = told.stop_text
        self._ended = last or told.stop_text is not None
        held = self._text_stops.flush() if last else ""
        self._pieces.append(told.text + held)

    def _flush(self) -> str:
        told = self._text_stops.push(self._detokenizer.flush())
        self.stop_text = told.stop_text
        return told.text + self._text_stops.flush()
