"""The pieces of a stream join to what decoding all ids at once gives, for every kind of decoder and any ids."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from services.detokenizer import IncrementalDetokenizer, TokenReader, detokenizer
from services.tokenizer import Tokenizer
from specdec.messages import TokenizerBundle

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = (
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "สวัสดีครับ ยินดีที่ได้รู้จัก",
    "你好，世界！吾輩は猫である。한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🎠 e\u0301 \u200d",
    "  two  spaces\n\n\tand tabs ",
    "مرحبا नमस्ते 𝕬𝖇𝖈 ﷽",
    "plain words, only words.",
)
CORPUS = [*TEXTS, "the horse and the rider", "the house", "ride ahead"]


def with_added_tokens(inner: Inner) -> Inner:
    inner.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<s>", special=True)])
    inner.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("〈道具〉 x", special=False)])
    return inner


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return with_added_tokens(inner)


def byte_level_and_more() -> Inner:
    """A decoder of no known shape over bytes."""
    inner = byte_level()
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("horse", "mare")])
    return inner


def byte_fallback(strip: bool) -> Inner:
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁▁",
        "e",
        "h",
        "t",
        "ů",
        "好",
        "👍",
        "a▁b",
    ]
    inner = Inner(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strip else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return with_added_tokens(inner)


def metaspace() -> Inner:
    inner = Inner(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    return with_added_tokens(inner)


def word_piece() -> Inner:
    inner = Inner(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return with_added_tokens(inner)


def no_decoder() -> Inner:
    inner = metaspace()
    content = json.loads(inner.to_str())
    content["decoder"] = None
    return Inner.from_str(json.dumps(content))


BUILDERS: dict[str, Callable[[], Inner]] = {
    "byte-level": byte_level,
    "byte-level and more": byte_level_and_more,
    "byte-fallback": lambda: byte_fallback(strip=True),
    "byte-fallback without strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "wordpiece": word_piece,
    "none": no_decoder,
}


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    inner = BUILDERS[kind]()
    size = inner.get_vocab_size()
    return Tokenizer(TokenizerBundle(kind, inner.to_str().encode(), None, None, (), 100, size))


def id_of(model: Tokenizer, token: str) -> int:
    token_id = model._inner.token_to_id(token)
    assert token_id is not None
    return int(token_id)


def pieces(stream: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@pytest.mark.parametrize("kind", BUILDERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_full_decode(kind: str, data: st.DataObject) -> None:
    model = tokenizer(kind)
    # A few ids beyond the vocabulary, which decoding leaves out.
    token_ids = data.draw(st.lists(st.integers(0, model.bundle.vocabulary_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    joined = "".join(pieces(model.detokenizer(skip_special_tokens=skip), token_ids))
    assert joined == model.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [kind for kind in BUILDERS if kind.startswith("byte")])
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(max_size=30), st.lists(st.sampled_from(TEXTS), max_size=3).map("".join)))
def test_any_text_comes_back_and_no_piece_breaks_a_character(kind: str, text: str) -> None:
    model = tokenizer(kind)
    token_ids = model.encode(text, add_special_tokens=False)
    parts = pieces(model.detokenizer(), token_ids)
    assert "".join(parts) == model.decode(token_ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_a_byte_level_stream_holds_back_no_complete_character(text: str) -> None:
    model = tokenizer("byte-level")
    token_ids = model.encode(text, add_special_tokens=False)
    stream, told = model.detokenizer(), ""
    for count, token_id in enumerate(token_ids, start=1):
        told += stream.push(token_id)
        so_far = model.decode(token_ids[:count])
        assert told == so_far.rstrip(REPLACEMENT) or told == so_far


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_many_scripts(kind: str, text: str) -> None:
    model = tokenizer(kind)
    token_ids = model.encode(text)
    assert "".join(pieces(model.detokenizer(), token_ids)) == model.decode(token_ids)
    if kind.startswith("byte"):
        # A stream cut anywhere ends as its own full decode, too: a request stops in the middle of a character.
        for end in range(len(token_ids)):
            assert "".join(pieces(model.detokenizer(), token_ids[:end])) == model.decode(token_ids[:end])


def test_an_emoji_arrives_whole_with_its_last_byte() -> None:
    model = tokenizer("byte-fallback")
    token_ids = [id_of(model, f"<0x{byte:02X}>") for byte in "🎠".encode()]
    following = id_of(model, "e")
    assert pieces(model.detokenizer(), [*token_ids, following]) == ["", "", "", "", "🎠e", ""]


def test_bytes_that_are_no_text_are_replaced_as_in_the_full_decode() -> None:
    model = tokenizer("byte-fallback")
    ids = {byte: id_of(model, f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xFF)}
    # One broken byte spoils its whole run in this kind of decoder, so none of it may be told before.
    token_ids = [ids[0xC3], ids[0xA9], ids[0xFF]]
    assert "".join(pieces(model.detokenizer(), token_ids)) == model.decode(token_ids) == REPLACEMENT * 3


@pytest.mark.parametrize("kind", BUILDERS)
def test_ten_thousand_random_tokens_raise_nothing_and_take_linear_work(kind: str) -> None:
    model = tokenizer(kind)
    numbers = random.Random(7)
    token_ids = [numbers.randrange(model.bundle.vocabulary_size) for _ in range(10_000)]
    assert "".join(pieces(model.detokenizer(), token_ids)) == model.decode(token_ids)


class CountingTokenizer:
    """Counts ids decoded."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        return str(self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("token", ["ÿ", "<|end|>", "a"])
def test_a_long_stream_through_an_unknown_decoder_takes_linear_work(token: str) -> None:
    model = tokenizer("byte-level")
    inner = model._inner
    counting = CountingTokenizer(inner)
    unknown = {"type": "Unknown"}
    stream = detokenizer(counting, unknown, TokenReader(inner), True)  # type: ignore[arg-type]
    token_ids = [id_of(model, token)] * 4000
    assert "".join(pieces(stream, token_ids)) == inner.decode(token_ids, skip_special_tokens=True)
    assert counting.decoded < 40 * len(token_ids)


def test_ids_out_of_range_are_left_out() -> None:
    model = tokenizer("byte-level")
    word = model.encode("the")
    assert "".join(pieces(model.detokenizer(), [-1, *word, 1 << 40])) == "the" == model.decode([-1, *word, 1 << 40])
