"""How a worker comes to its grammar masks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from specdec.grammar import InvalidGrammar, MaskFactory, TokenMask
from specdec.grammars import Grammars, UnsupportedTokenizer
from specdec.params import Grammar

log = logging.getLogger(__name__)


def mask_factory(tokenizer_json: bytes, vocabulary_size: int, stop_token_ids: Iterable[int]) -> MaskFactory:
    """Of the model that a worker serves, to be made before it serves: it takes 0.3 to 2 s and holds the interpreter.

    A model that no grammar can be used with is served without; its users are told so.
    """
    try:
        return Grammars(tokenizer_json, vocabulary_size, sorted(stop_token_ids))
    except UnsupportedTokenizer as error:
        log.warning("no structured output: %s", error)
        reason = str(error)

    def refuse(grammar: Grammar) -> TokenMask:
        raise InvalidGrammar(f"this model cannot be held to one: {reason}")

    return refuse
