"""A made-up byte-level vocabulary whose tokens are pieces of JSON, and what a mask says in its terms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from specdec.grammars import Grammars
from specdec.params import Grammar, GrammarKind

PIECES = (
    *(chr(code) for code in range(0x20, 0x7F)),
    "\n",
    *('{"', '":', '": ', '",', '", "', '"}', "}}", "]}", '["', '"]', "[{", "}]", "[]", "{}", ': "', ', "', ": ", ", "),
    *("true", "false", "null", "12", "00", "-1", "1.", "e+", "ab", "abc", "cab", "name", '"name"', '"a":', "red", "re"),
    *("  ", "\n  ", "\\n", "\\u"),
)
SPECIAL = ("<stop>", "<system>")
PLACEHOLDERS = 5


def byte_tokens() -> list[bytes]:
    """Halves of characters too, as byte-level vocabularies have them."""
    return [*(piece.encode() for piece in PIECES), b"\xc3", b"\xa9", "é".encode(), b"\xe2\x82", b"\xac"]


TOKENS: Sequence[bytes] = byte_tokens()
STOP = len(TOKENS)
SYSTEM = STOP + 1
VOCABULARY = SYSTEM + 1
"""Real ids; placeholders lie behind them."""


def token_id(text: str | bytes) -> int:
    return TOKENS.index(text.encode() if isinstance(text, str) else text)


def spelled(text: str | bytes) -> list[int]:
    """One token per byte."""
    data = text.encode() if isinstance(text, str) else text
    return [token_id(data[i : i + 1]) for i in range(len(data))]


def text_of(token_ids: Sequence[int]) -> bytes:
    """Without special tokens."""
    return b"".join(TOKENS[i] for i in token_ids if i < STOP)


def byte_level_json(tokens: Sequence[bytes], special: Sequence[str] = (), placeholders: int = 0) -> bytes:
    """A tokenizer.json with these tokens in the order of their ids; it merges nothing."""
    names = _names_of_bytes()
    vocabulary = {"".join(names[byte] for byte in token): i for i, token in enumerate(tokens)}
    first = len(tokens)
    added = [_added(first + i, text, special=True) for i, text in enumerate(special)]
    first += len(special)
    added += [_added(i, f"[PAD{i}]", special=False) for i in range(first, first + placeholders)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False},
    }
    return json.dumps(content).encode()


def make_grammars() -> Grammars:
    tokenizer_json = byte_level_json(TOKENS, SPECIAL, PLACEHOLDERS)
    return Grammars(tokenizer_json, VOCABULARY, [STOP])


@cache
def shared_grammars() -> Grammars:
    return make_grammars()


def schema(content: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def ids_of(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1}


def _added(token_id: int, content: str, special: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def _names_of_bytes() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it shows, else one from 256 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names: list[str] = []
    hidden = 0
    for byte in range(256):
        names.append(chr(byte) if byte in shown else chr(256 + hidden))
        hidden += byte not in shown
    return names
