"""The seam behind which a grammar says which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specdec.params import Grammar

GRAMMAR_REFUSED = "grammar: "
"""What a refusal of a sequence for its grammar begins with; its user is to blame, not the worker."""


class InvalidGrammar(ValueError):
    """The grammar cannot be compiled; the message is one line and says where."""


class TokenMask(Protocol):
    """What one sequence's grammar allows. Called from one thread only."""

    def allowed(self, answer: Sequence[int]) -> bytes:
        """Tokens that may follow `answer`, the tokens behind the prompt: bit i % 8 of byte i // 8 for token i, padded
        with zeros to a multiple of 4 bytes. All ones behind an answer that the grammar does not allow: nothing that
        stands there can be committed. All zeros at a dead end, where the grammar neither ends nor goes on."""
        ...


MaskFactory = Callable[[Grammar], TokenMask]
"""Raises InvalidGrammar."""
