"""Bad words as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.errors import InvalidRequest
from services.tokenizer import Tokenizer


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text and, where that is other tokens, behind a blank.

    Raises InvalidRequest for a word without tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        first = _encoded(word.lstrip(), index, tokenizer)
        if not first:
            raise InvalidRequest("bad_words", f"bad_words[{index}] is {word!r}, must have at least one token")
        spaced = _encoded(" " + word.lstrip(), index, tokenizer)
        sequences[first] = None
        if spaced[-len(first) :] != first:  # else the first one forbids it too
            sequences[spaced] = None
    return tuple(sequences)


def _encoded(text: str, index: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except ValueError as error:
        raise InvalidRequest("bad_words", f"bad_words[{index}]: {error}") from None
