"""Stop texts: where a growing text ends, and what of it may be told before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """text: what may be told now. stop_text: the one that ends the text, if one does; nothing comes behind it."""

    text: str
    stop_text: str | None = None


class TextStops:
    """Of one answer; a stop text may lie across any number of pieces.

    The stop text that is complete first ends the text, the longest of those that are complete at the same character:
    so the end does not depend on how the text was cut into pieces. The text ends before it, or behind it if it is to be
    included. What may yet become a stop text is held back; with no stop texts nothing is.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=1)
        self._recent = ""  # the last characters of the text, as many as may belong to a stop text that is not complete
        self._held = ""  # the end of it that was not told

    @property
    def none(self) -> bool:
        """No text ends the answer: all of it may be told at once."""
        return not self._stops

    def push(self, text: str, armed: bool = True) -> Told:
        """The next piece. Not armed: what is complete in it does not end the text (it has fewer than `min_tokens`)."""
        if not self._stops:
            return Told(text)
        window, untold = self._recent + text, self._held + text
        end = self._end(window, len(self._recent)) if armed else None
        if end is not None:
            stop, position = end
            cut = position if self._include else position - len(stop)
            self._held = ""
            return Told(window[len(window) - len(untold) : cut], stop)
        kept = 0 if self._include else self._beginning(window)
        told, self._held = untold[: len(untold) - kept], untold[len(untold) - kept :]
        self._recent = window[max(len(window) - self._longest + 1, 0) :]
        return Told(told)

    def flush(self) -> str:
        """What was held back; the text ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _end(self, window: str, known: int) -> tuple[str, int] | None:
        """The stop text that is complete first behind the `known` characters, and where it ends."""
        found = []
        for stop in self._stops:
            start = window.find(stop, max(known - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), -len(stop), stop))
        if not found:
            return None
        position, _, stop = min(found)
        return stop, position

    def _beginning(self, window: str) -> int:
        """Characters at the end of `window` with which a stop text begins."""
        return max((_beginning(stop, window) for stop in self._stops), default=0)


def _beginning(stop: str, window: str) -> int:
    """The longest beginning of `stop`, not all of it, with which `window` ends."""
    start = window.find(stop[0], max(len(window) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(window[start:]):
        start = window.find(stop[0], start + 1)
    return len(window) - start if start >= 0 else 0
