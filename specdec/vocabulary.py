"""Which token ids a model really has, and whether a draft worker's vocabulary is a target's.

Tokenizer files are not compared byte for byte: the same vocabulary is written in many ways. What counts are the *real*
ids with their token and special flag. A vocabulary padded with placeholders (`[PAD151665]` as id 151665, and so on to
its end) is as long as without them, and so is a model whose logits have more columns than there are tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from specdec.messages import Identity

RUN_LENGTH = 1024
"""Ids per run digest."""
DIGEST_BYTES = 32
ID_DIGEST_BYTES = 8
"""Enough to tell one token from another."""


class InvalidTokenizer(Exception):
    """The content is no tokenizer.json with a vocabulary; the message is one line."""


@dataclass(frozen=True, slots=True)
class Token:
    token_id: int
    text: str
    special: bool

    @property
    def is_placeholder(self) -> bool:
        return self.text == f"[PAD{self.token_id}]"

    @property
    def encoded(self) -> bytes:
        """Unambiguous bytes for digests; a token may hold any character, lone surrogates included."""
        text = self.text.encode("utf-8", "surrogatepass")
        return self.token_id.to_bytes(4, "little") + bytes([self.special]) + len(text).to_bytes(4, "little") + text


@dataclass(frozen=True, slots=True)
class VocabularyDigest:
    """What two vocabularies are compared by.

    size: highest real id + 1, the columns of a logits row that count. sha256: hex, over all real ids. run_digests: raw
    sha256 of each run of RUN_LENGTH ids, concatenated; they bound the first id that differs.
    """

    size: int
    sha256: str
    run_digests: bytes

    @classmethod
    def of(cls, tokenizer_json: bytes | str) -> VocabularyDigest:
        """Raises `InvalidTokenizer`."""
        return cls.of_tokens(read_tokens(tokenizer_json))

    @classmethod
    def of_tokens(cls, tokens: Sequence[Token]) -> VocabularyDigest:
        """tokens: the real ones in the order of their ids, as `read_tokens` gives them."""
        return cls(
            size=tokens[-1].token_id + 1 if tokens else 0,
            sha256=hashlib.sha256(b"".join(token.encoded for token in tokens)).hexdigest(),
            run_digests=b"".join(_run_digests(tokens)),
        )


def _run_digests(tokens: Sequence[Token]) -> Iterator[bytes]:
    runs = {
        run: hashlib.sha256(b"".join(token.encoded for token in members)).digest()
        for run, members in groupby(tokens, key=lambda token: token.token_id // RUN_LENGTH)
    }
    empty = hashlib.sha256().digest()  # a run may lie in a gap between ids
    return (runs.get(run, empty) for run in range(max(runs, default=-1) + 1))


def read_tokens(tokenizer_json: bytes | str) -> tuple[Token, ...]:
    """The real tokens of a tokenizer.json in the order of their ids. Raises `InvalidTokenizer`."""
    try:
        content = json.loads(tokenizer_json)
        texts = dict(_model_tokens(content["model"]["vocab"]))
        special: dict[int, bool] = {}
        for added in content.get("added_tokens") or ():
            texts[int(added["id"])] = str(added["content"])
            special[int(added["id"])] = bool(added.get("special", False))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidTokenizer(f"no vocabulary in this tokenizer.json ({type(error).__name__}: {error})") from error
    tokens = [Token(token_id, texts[token_id], special.get(token_id, False)) for token_id in sorted(texts)]
    while tokens and tokens[-1].is_placeholder:
        tokens.pop()
    if not tokens or tokens[0].token_id < 0:
        raise InvalidTokenizer("no vocabulary in this tokenizer.json (it has no token, or a negative id)")
    return tuple(tokens)


def _model_tokens(vocabulary: Any) -> Iterable[tuple[int, str]]:
    """BPE, WordPiece and WordLevel map token to id; Unigram lists (token, score) by id."""
    if isinstance(vocabulary, dict):
        return ((int(token_id), text) for text, token_id in vocabulary.items())
    return ((token_id, str(entry[0])) for token_id, entry in enumerate(vocabulary))


def id_digests(tokens: Sequence[Token], run: int) -> bytes:
    """ID_DIGEST_BYTES for each id of a run, in order; zeros for an id without a token. tokens: in the order of ids."""
    digests = bytearray(RUN_LENGTH * ID_DIGEST_BYTES)
    for token in tokens:
        if token.token_id // RUN_LENGTH == run:
            start = token.token_id % RUN_LENGTH * ID_DIGEST_BYTES
            digests[start : start + ID_DIGEST_BYTES] = hashlib.sha256(token.encoded).digest()[:ID_DIGEST_BYTES]
    return bytes(digests)


def first_differing_run(first: Identity, second: Identity) -> int | None:
    """The first run of RUN_LENGTH ids in which two vocabularies differ; None if none is known to."""
    return _first_differing_run(first.vocabulary_run_digests, second.vocabulary_run_digests)


def first_differing_digest(run: int, first: bytes, second: bytes) -> int | None:
    """The first id of a run whose digest differs; None if all agree or one side does not tell."""
    for start in range(0, min(len(first), len(second)), ID_DIGEST_BYTES):
        if first[start : start + ID_DIGEST_BYTES] != second[start : start + ID_DIGEST_BYTES]:
            return run * RUN_LENGTH + start // ID_DIGEST_BYTES
    return None


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a draft worker may propose to a target; `reason` is one line, empty if it fits."""

    fits: bool
    reason: str = ""


def fit(draft: Identity, target: Identity, first_differing_id: int | None = None) -> Fit:
    """Compares what the workers say of themselves. A drafter without a model (vocabulary_size 0) fits every target.

    first_differing_id: for the reason, where it is known; else the reason tells its run of RUN_LENGTH ids.
    """
    if draft.vocabulary_size == 0:
        return Fit(True)
    if (draft.vocabulary_size, draft.vocabulary_sha256) == (target.vocabulary_size, target.vocabulary_sha256):
        return Fit(True)
    where = _difference(draft, target) if first_differing_id is None else f"first differing id {first_differing_id}"
    return Fit(
        False,
        f"draft model {draft.model_name} ({draft.vocabulary_size} token ids) does not share the vocabulary of "
        f"target model {target.model_name} ({target.vocabulary_size} token ids): {where}",
    )


def _difference(draft: Identity, target: Identity) -> str:
    """Where the first differing id lies, as closely as run digests tell."""
    run = _first_differing_run(draft.vocabulary_run_digests, target.vocabulary_run_digests)
    if run is None:
        return "first differing id unknown"
    sizes = (draft.vocabulary_size, target.vocabulary_size)
    last = min((run + 1) * RUN_LENGTH, max(sizes)) - 1
    return f"first differing id between {run * RUN_LENGTH} and {last}"


def _first_differing_run(first: bytes, second: bytes) -> int | None:
    if not first or not second:
        return None
    for start in range(0, max(len(first), len(second)), DIGEST_BYTES):
        if first[start : start + DIGEST_BYTES] != second[start : start + DIGEST_BYTES]:
            return start // DIGEST_BYTES
    return None
