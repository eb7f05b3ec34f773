"""Token ids to text, one token at a time.

The pieces of a stream join to exactly what decoding all its ids at once gives. So a piece never ends inside a
character, and has no U+FFFD that the full text has not. What can still change is held back until it cannot.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenReader:
    """The tokens that ids stand for, as the tokenizer's decoder gets them."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
        self._bytes: dict[tuple[int, bool], bytes] = {}
        self._tokens: dict[int, str] = {}

    def byte_level(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """As `read`, where each token is a run of bytes; none for an id that decoding leaves out. Remembered for all
        streams: most of a text are the same few tokens."""
        known = self._bytes.get((token_id, skip_special_tokens))
        if known is None:
            token = self.read(token_id, skip_special_tokens)
            known = b"" if token is None else _token_bytes(token)
            if token is not None:  # so it holds no more than the vocabulary, whatever ids come
                self._bytes[token_id, skip_special_tokens] = known
        return known

    def read(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """None for an id that decoding leaves out."""
        token = self._tokens.get(token_id)
        if token is None:
            if not 0 <= token_id < 1 << 32 or (token := self._inner.id_to_token(token_id)) is None:
                return None
            self._tokens[token_id] = token
        return None if skip_special_tokens and token in self._special else token


class IncrementalDetokenizer(ABC):
    """Of one stream. `push` every token in order, then `flush` once."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Text that is certain now; often empty inside a character."""

    @abstractmethod
    def flush(self) -> str:
        """What was held back; the stream has ended."""


def detokenizer(
    inner: tokenizers.Tokenizer, decoder: dict[str, Any] | None, reader: TokenReader, skip_special_tokens: bool
) -> IncrementalDetokenizer:
    """decoder: that part of the tokenizer.json."""
    if decoder is None:
        return _Spaced(reader, skip_special_tokens)
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevel(reader, skip_special_tokens)
    rules = _TextRules.parse(steps)
    if rules is not None:
        return _ByteFallback(reader, skip_special_tokens, rules)
    return _Window(inner, skip_special_tokens)


def token_bytes(
    inner: tokenizers.Tokenizer, decoder: dict[str, Any] | None, reader: TokenReader, token_id: int
) -> bytes:
    """What one token stands for, special or not; part of a character may be all of it. Unknown ids: nothing."""
    token = reader.read(token_id, skip_special_tokens=False)
    if token is None:
        return b""
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _token_bytes(token)
    rules = _TextRules.parse(steps)
    if rules is None:
        return str(inner.decode([token_id], skip_special_tokens=False)).encode()
    for rewrite in rules.rewrites:
        token = rewrite(token)
    byte = BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
    return token.encode() if byte is None else bytes([int(byte[1], 16)])


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class _ByteLevel(IncrementalDetokenizer):
    """Each token is a run of bytes; only the UTF-8 decoder has state."""

    def __init__(self, reader: TokenReader, skip_special_tokens: bool) -> None:
        self._reader = reader
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._reader.byte_level(token_id, self._skip_special_tokens))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _token_bytes(token: str) -> bytes:
    """An added token may hold characters outside the alphabet; then it stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class _Spaced(IncrementalDetokenizer):
    """Without a decoder tokens are words, with blanks between them."""

    def __init__(self, reader: TokenReader, skip_special_tokens: bool) -> None:
        self._reader = reader
        self._skip_special_tokens = skip_special_tokens
        self._before = ""

    def push(self, token_id: int) -> str:
        token = self._reader.read(token_id, self._skip_special_tokens)
        if token is None:
            return ""
        piece = self._before + token
        self._before = " "
        return piece

    def flush(self) -> str:
        return ""


Rewrite = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _TextRules:
    """`Replace* ByteFallback? Fuse Strip?` , as SentencePiece-like tokenizers have it; Strip takes from the start."""

    rewrites: tuple[Rewrite, ...]
    byte_fallback: bool
    strip: str = ""
    strip_count: int = 0

    @classmethod
    def parse(cls, steps: list[dict[str, Any]]) -> _TextRules | None:
        """None if the decoder is of another shape."""
        rewrites: list[Rewrite] = []
        rest = list(steps)
        while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
            step = rest.pop(0)
            rewrites.append(_replacement(step["pattern"]["String"], step["content"]))
        byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
        rest = rest[1:] if byte_fallback else rest
        match rest:
            case [{"type": "Fuse"}]:
                return cls(tuple(rewrites), byte_fallback)
            case [{"type": "Fuse"}, {"type": "Strip", "content": str(strip), "start": int(start), "stop": 0}]:
                return cls(tuple(rewrites), byte_fallback, strip, start)
        return None


def _replacement(pattern: str, content: str) -> Rewrite:
    return lambda token: token.replace(pattern, content)


class _ByteFallback(IncrementalDetokenizer):
    """Tokens are text, and characters outside the vocabulary are runs of byte tokens (`<0xF0>`).

    A whole run is one text, or U+FFFD per byte if it is not valid, so it is held until its end.
    """

    def __init__(self, reader: TokenReader, skip_special_tokens: bool, rules: _TextRules) -> None:
        self._reader = reader
        self._skip_special_tokens = skip_special_tokens
        self._rules = rules
        self._left_to_strip = rules.strip_count
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        token = self._reader.read(token_id, self._skip_special_tokens)
        if token is None:
            return ""
        for rewrite in self._rules.rewrites:
            token = rewrite(token)
        byte = BYTE_TOKEN.fullmatch(token) if self._rules.byte_fallback else None
        if byte is not None:
            self._run.append(int(byte[1], 16))
            return ""
        return self._stripped(self._end_run() + token)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._left_to_strip and text:
            if text[0] != self._rules.strip:
                self._left_to_strip = 0
            else:
                self._left_to_strip -= 1
                text = text[1:]
        return text


class _Window(IncrementalDetokenizer):
    """Any other decoder: decodes the last few tokens with and without the newest, and tells the difference.

    What such a decoder does at the end of a text (an end-of-word mark, say) is settled against the full text in
    `flush`.
    """

    def __init__(self, inner: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._inner = inner
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._told: list[str] = []
        self._context = 0  # first token of the window
        self._settled = 0  # tokens before this one are told
        self._next_try = 0

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < 1 << 32:
            return ""
        self._token_ids.append(token_id)
        held = len(self._token_ids) - self._settled
        if held < self._next_try:
            return ""
        # Ever rarer while nothing comes of it, so that a long run of broken bytes costs no quadratic time.
        self._next_try = held + held // 8
        before = self._decode(self._token_ids[self._context : self._settled])
        after = self._decode(self._token_ids[self._context :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before) or not after.startswith(before):
            return ""
        piece = after[len(before) :]
        self._context, self._settled, self._next_try = self._settled, len(self._token_ids), 0
        self._told.append(piece)
        return piece

    def flush(self) -> str:
        full, told = self._decode(self._token_ids), "".join(self._told)
        return full[len(told) :] if full.startswith(told) else ""

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._inner.decode(token_ids, skip_special_tokens=self._skip_special_tokens))
