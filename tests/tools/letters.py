"""Short pieces of text as the vocabulary of table models: every stop text lies across tokens sooner or later."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models

from scheduler.request import Event, GenerationRequest
from scheduler.scheduler import Scheduler
from services.detokenizer import BYTE_ALPHABET
from services.gateway import Gateway
from services.generation import ChoiceFinished, ChoiceStarted, TextTokens, UserRequest
from specdec.commit import FinishReason
from specdec.messages import Identity, TokenizerBundle, TokenLogprobs

HALVES = "\u00e9".encode()


def pieces(count: int) -> list[bytes]:
    """Of 1 to 3 letters; the last two are the halves of one character."""
    letters = [
        "".join(letters).encode() for length in (1, 2, 3) for letters in itertools.product("abc ", repeat=length)
    ]
    return [*letters[: count - 2], HALVES[:1], HALVES[1:]]


def letters_bundle(count: int = 64, context_length: int = 512) -> TokenizerBundle:
    characters = {byte: character for character, byte in BYTE_ALPHABET.items()}
    vocabulary = {"".join(characters[byte] for byte in piece): i for i, piece in enumerate(pieces(count))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return TokenizerBundle("table", inner.to_str().encode(), None, None, (), context_length, count, {})


def text_of(token_ids: Sequence[int], count: int = 64) -> str:
    """What is certain of the text behind these tokens: an incomplete character at the end is left out."""
    vocabulary = pieces(count)
    content = b"".join(vocabulary[token_id] for token_id in token_ids)
    if content.endswith(HALVES[:1]):
        content = content[:-1]
    return content.decode(errors="replace")


class Bundled:
    """A real scheduler whose targets give this bundle."""

    def __init__(self, scheduler: Scheduler, bundle: TokenizerBundle) -> None:
        self._scheduler = scheduler
        self._bundle = bundle

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        return self._scheduler.generate(request)

    def models(self) -> Sequence[Identity]:
        return self._scheduler.models()

    async def tokenizer(self, model: str) -> TokenizerBundle:
        return self._bundle


@dataclass(slots=True)
class TextAnswer:
    """One choice, taken apart."""

    started: ChoiceStarted
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    text: str = ""
    echo: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: ChoiceFinished | None = None

    @property
    def told(self) -> tuple[object, ...]:
        """All that must not depend on how the tokens came about."""
        end = self.finished
        reason: FinishReason | None = end.finish_reason if end else None
        usage = (end.prompt_tokens, end.completion_tokens, end.stop_text) if end else ()
        logprobs = [(round(one.logprob, 4), [token_id for token_id, _ in one.top]) for one in self.logprobs]
        return self.token_ids, self.pieces, self.text, logprobs, reason, usage


async def ask_all(gateway: Gateway, request: UserRequest) -> list[TextAnswer]:
    """All choices, by index; every event is checked against those before it."""
    answers: dict[int, TextAnswer] = {}
    async for event in gateway.generate(request):
        if isinstance(event, ChoiceStarted):
            assert event.index not in answers
            answers[event.index] = TextAnswer(event)
            continue
        answer = answers[event.index]
        assert answer.finished is None
        if isinstance(event, ChoiceFinished):
            answer.finished = event
        elif event.token_ids:
            _add(answer, event)
        elif answer.token_ids or not request.echo:
            answer.text += event.text
        else:
            answer.echo += event.text
    for answer in answers.values():
        assert answer.finished is not None
        assert answer.finished.completion_tokens == len(answer.token_ids)
    return [answers[index] for index in sorted(answers)]


async def ask(gateway: Gateway, request: UserRequest) -> TextAnswer:
    (answer,) = await ask_all(gateway, request)
    return answer


def _add(answer: TextAnswer, event: TextTokens) -> None:
    assert event.position == len(answer.token_ids)
    assert len(event.pieces) == len(event.token_ids) == len(event.sources)
    assert "".join(event.pieces) == event.text
    answer.token_ids += event.token_ids
    answer.pieces += event.pieces
    answer.text += event.text
    answer.logprobs += event.logprobs
