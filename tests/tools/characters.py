"""A table model that writes text: mostly whole characters of many bytes, spelled by tokens that cut them anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from services.detokenizer import BYTE_ALPHABET
from specdec.messages import Identity, Role, TokenizerBundle
from specdec.vocabulary import VocabularyDigest
from tools.table_law import TableLaw

END = "<|end|>"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
CHARACTERS = (
    *"abdeghinrstu .,",
    *("é", "ř", "ů", "ส", "ก", "好", "世", "界", "한", "🎠", "🐎", "e\u0301"),
    *("👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "❤️"),
)
LONGEST = max(len(character.encode()) for character in CHARACTERS)
PIECES = (
    *(" the", "the", "ing", "er", "hen", " a", ". ", "ée", " ů", "好世", "世界", "한 ", "🎠", "🐎🐎"),
    *("\u200d", "👩\u200d", "\ufe0f"),
)
TORN = (
    b"\xf0\x9f",
    b"\x91\xa9\xe2",
    b"\x80\x8d",
    b"\x8d\xf0\x9f",
    b" \xf0",
    b"\x8e\xa0 ",
    b"\xe4\xb8",
    b"\x96a",
    b"e\xcc",
)
"""Tokens that end or begin inside a character."""


@dataclass(frozen=True)
class CharacterLaw(TableLaw):
    """A `TableLaw` under which tokens that spell out `CHARACTERS` score higher by `spelling`, so does the end of the
    text between them. pieces: the bytes of each token; none: the end, or no text."""

    pieces: tuple[bytes, ...] = ()
    end_id: int = 0
    spelling: float = 12.0

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        row = super()._compute(key).copy()
        tail = b"".join(self.pieces[token_id] for token_id in key[-32:])[-LONGEST:]
        begun = _begun(tail)
        row[list(_spelled(self.pieces, begun))] += np.float32(self.spelling)
        if not begun or _whole(begun):
            row[self.end_id] += np.float32(self.spelling)
        row.setflags(write=False)
        return row


def _whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=1 << 16)
def _begun(tail: bytes) -> bytes:
    """The longest end of `tail` with which a longer character begins."""
    spelled = [character.encode() for character in CHARACTERS]
    for length in range(len(tail), 0, -1):
        end = tail[-length:]
        if any(len(character) > length and character.startswith(end) for character in spelled):
            return end
    return b""


@lru_cache(maxsize=1024)
def _spelled(pieces: tuple[bytes, ...], begun: bytes) -> tuple[int, ...]:
    """Tokens that go on from `begun` with whole characters or the beginning of one."""
    every = [character.encode() for character in CHARACTERS]
    rests = [character[len(begun) :] for character in every if character.startswith(begun)]
    if _whole(begun):
        rests += every
    return tuple(i for i, piece in enumerate(pieces) if piece and _goes_on(piece, rests, every))


def _goes_on(piece: bytes, rests: Sequence[bytes], every: Sequence[bytes]) -> bool:
    if not piece or any(rest.startswith(piece) for rest in rests):
        return True
    return any(piece.startswith(rest) and _goes_on(piece[len(rest) :], every, every) for rest in rests if rest)


@dataclass(frozen=True)
class Writer:
    """A vocabulary with its tokenizer. pieces: the bytes of each token, empty for END."""

    name: str
    pieces: tuple[bytes, ...]
    bundle: TokenizerBundle

    @property
    def end_id(self) -> int:
        return self.bundle.stop_token_ids[0]

    def law(self, order: int = 1000, sharpness: float = 8.0, spelling: float = 12.0, salt: str = "table") -> TableLaw:
        """order 1000 looks back at everything, so that any stale or missing token shows."""
        return CharacterLaw(
            len(self.pieces), order, sharpness, salt, pieces=self.pieces, end_id=self.end_id, spelling=spelling
        )

    def identity(self, worker_id: str, context_length: int) -> Identity:
        digest = VocabularyDigest.of(self.bundle.tokenizer_json)
        return Identity(
            worker_id,
            Role.TARGET,
            self.name,
            digest.size,
            digest.sha256,
            digest.run_digests,
            context_length=context_length,
            dtype="float32",
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """By the tokenizers library, all at once."""
        inner = tokenizers.Tokenizer.from_str(self.bundle.tokenizer_json.decode())
        return str(inner.decode(list(token_ids)))


def _writer(name: str, inner: tokenizers.Tokenizer, pieces: Sequence[bytes]) -> Writer:
    inner.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    size = len(pieces) + 1
    bundle = TokenizerBundle(name, inner.to_str().encode(), TEMPLATE, None, (size - 1,), 512, size, {"eos_token": END})
    return Writer(name, (*pieces, b""), bundle)


def _byte_level(decoder: decoders.Decoder) -> tuple[tokenizers.Tokenizer, list[bytes]]:
    pieces = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + list(TORN)
    letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    vocabulary = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoder
    return inner, pieces


@lru_cache
def byte_level() -> Writer:
    """Every token is a run of bytes, many of them no characters."""
    return _writer("byte-level", *_byte_level(decoders.ByteLevel()))


@lru_cache
def windowed() -> Writer:
    """The same tokens behind a decoder of no known shape."""
    steps = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("z", "Z")])
    return _writer("windowed", *_byte_level(steps))


@lru_cache
def byte_fallback() -> Writer:
    """Whole characters, and `<0xF0>` for the bytes of those that the vocabulary lacks."""
    texts = [piece for piece in PIECES if piece not in ("🐎🐎", "🎠")]
    texts += [character for character in CHARACTERS if character.isascii() or character in ("é", "好", "한")]
    names = [f"<0x{byte:02X}>" for byte in range(256)] + [text.replace(" ", "▁") for text in texts]
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _writer("byte-fallback", inner, [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts])
