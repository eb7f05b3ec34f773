"""An answer as it streams: each piece in the colour of where it came from, and the figures at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from outrider.events import TokenLogprobs, TokenSource
from services.logs import use_colours

COLOURS = {
    TokenSource.ACCEPTED: "32",
    TokenSource.CORRECTION: "33",
    TokenSource.BONUS: "33",
    TokenSource.PLAIN: "36",
}
_LEGEND = (
    (TokenSource.ACCEPTED, "accepted from the draft"),
    (TokenSource.CORRECTION, "correction or bonus of the target"),
    (TokenSource.PLAIN, "plain, without a draft"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a finished answer tells of itself. Durations in seconds."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    duration: float
    time_to_first_token: float
    mode: str
    acceptance_rate: float | None
    mean_acceptance_length: float
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    num_failovers: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.duration if self.duration > 0 else 0.0

    def line(self) -> str:
        """One line for people."""
        rate, length = "-", "-"
        if self.acceptance_rate is not None:
            rate, length = f"{self.acceptance_rate:.0%}", f"{self.mean_acceptance_length:.2f}"
        return (
            f"{self.completion_tokens} tokens in {self.duration:.2f} s: {self.tokens_per_second:.1f} tokens/s, "
            f"acceptance rate {rate}, mean acceptance length {length}, mode {self.mode}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(slots=True)
class Answer:
    """All of one choice, for `--json` and for comparisons. logprobs: one per token if asked for."""

    index: int = 0
    pieces: list[tuple[str, TokenSource]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    model: str = ""
    seed: int | None = None
    sequence_id: str = ""
    stop_text: str | None = None
    figures: Figures | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "model": self.model,
            "text": self.text,
            "token_ids": self.token_ids,
            "seed": self.seed,
            "sequence_id": self.sequence_id,
            "figures": self.figures.as_dict() if self.figures else None,
        }
        if self.stop_text is not None:
            values["stop_text"] = self.stop_text
        if self.logprobs:
            values["logprobs"] = [{"logprob": token.logprob, "top": dict(token.top)} for token in self.logprobs]
        return values

    def notes(self) -> list[str]:
        """What is told of the answer beside its text, line by line."""
        lines = [
            f"{token.logprob:10.4f}  {text!r:16}  "
            + "  ".join(f"{token_id}: {value:.4f}" for token_id, value in token.top)
            for text, token in zip(self.token_texts, self.logprobs, strict=False)
        ]
        if self.figures is not None:
            stopped = "" if self.stop_text is None else f", stopped by {self.stop_text!r}"
            lines.append(f"{self.figures.line()}{stopped}, seed {self.seed}, sequence {self.sequence_id}")
        return [line.rstrip() for line in lines]


class AnswerView:
    """Writes pieces of text as they come; colours only on a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._colours = use_colours(self._stream)
        self._ended_line = True

    def write(self, pieces: Iterable[tuple[str, TokenSource]]) -> None:
        for text, source in pieces:
            if text:
                self._stream.write(self._painted(text, source))
                self._ended_line = text.endswith("\n")
        self._stream.flush()

    def end_line(self) -> None:
        if not self._ended_line:
            self._stream.write("\n")
            self._stream.flush()
            self._ended_line = True

    def legend(self) -> str:
        """What the colours mean; empty where there are none."""
        if not self._colours:
            return ""
        return "   ".join(self._painted(f"■ {meaning}", source) for source, meaning in _LEGEND)

    def _painted(self, text: str, source: TokenSource) -> str:
        colour = COLOURS.get(source)
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colours and colour else text
