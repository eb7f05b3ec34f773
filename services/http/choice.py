"""One choice of an answer, in the form of one of the two APIs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from services.generation import ChoiceFinished, ChoiceStarted, TextTokens
from services.http.token_text import Json


class Choice(ABC):
    """Told every event of its choice in order, it gives each time the chunks of a stream, and in the end the whole."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.seed = 0
        self.finished: ChoiceFinished | None = None

    def start(self, event: ChoiceStarted) -> list[Json]:
        self.seed = event.seed
        return []

    @abstractmethod
    def add(self, event: TextTokens) -> list[Json]: ...

    @abstractmethod
    def finish(self, event: ChoiceFinished) -> list[Json]:
        """The last of these has the finish_reason."""

    @abstractmethod
    def whole(self) -> Json: ...

    def ending(self, event: ChoiceFinished, reason: str) -> Json:
        """What tells of the end, in a chunk and in the whole: the seed repeats the choice."""
        return {"finish_reason": reason, "stop_reason": event.stop_text, "seed": self.seed}


MakeChoice = Callable[[int], Choice]
