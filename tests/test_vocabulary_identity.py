"""A draft fits a target exactly if their real token ids are the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from specdec.messages import Identity, Role
from specdec.vocabulary import (
    RUN_LENGTH,
    InvalidTokenizer,
    VocabularyDigest,
    first_differing_digest,
    fit,
    id_digests,
    read_tokens,
)

WORDS = [f"word{number}" for number in range(3000)]


def tokenizer_json(
    words: list[str], *, special: tuple[str, ...] = (), padding: int = 0, kind: str = "BPE", added_padding: bool = False
) -> bytes:
    """Special tokens come behind the words, placeholders behind both."""
    first = len(words)
    added = [{"id": first + index, "content": text, "special": True} for index, text in enumerate(special)]
    places = range(first + len(special), first + len(special) + padding)
    vocabulary: object
    if kind == "Unigram":
        vocabulary = [[word, -1.0] for word in words]
    else:
        vocabulary = {word: index for index, word in enumerate(words)}
        if not added_padding:
            vocabulary |= {f"[PAD{place}]": place for place in places}
    if added_padding:
        added += [{"id": place, "content": f"[PAD{place}]", "special": True} for place in places]
    return json.dumps({"added_tokens": added, "model": {"type": kind, "vocab": vocabulary}}).encode()


def identity(name: str, content: bytes, role: Role = Role.TARGET) -> Identity:
    digest = VocabularyDigest.of(content)
    return Identity(
        worker_id=f"{name}-1",
        role=role,
        model_name=name,
        vocabulary_size=digest.size,
        vocabulary_sha256=digest.sha256,
        vocabulary_run_digests=digest.run_digests,
    )


@pytest.mark.parametrize("added_padding", [False, True])
def test_placeholders_do_not_count(added_padding: bool) -> None:
    bare = VocabularyDigest.of(tokenizer_json(WORDS, special=("<end>",)))
    padded = VocabularyDigest.of(tokenizer_json(WORDS, special=("<end>",), padding=71, added_padding=added_padding))
    assert padded == bare
    assert bare.size == 3001


def test_a_placeholder_in_the_middle_is_a_token() -> None:
    words = [*WORDS[:5], "[PAD5]", *WORDS[5:]]
    assert VocabularyDigest.of(tokenizer_json(words)).size == 3001


def test_a_placeholder_of_another_number_is_a_token() -> None:
    assert VocabularyDigest.of(tokenizer_json([*WORDS, "[PAD7]"])).size == 3001


def test_how_the_file_is_written_does_not_matter() -> None:
    content = tokenizer_json(WORDS, special=("<end>",))
    parsed = json.loads(content)
    parsed["model"]["vocab"] = dict(reversed(parsed["model"]["vocab"].items())) | {"<end>": 3000}
    assert VocabularyDigest.of(json.dumps(parsed, indent=2)) == VocabularyDigest.of(content)


def test_unigram_list_and_dictionary_are_one_vocabulary() -> None:
    assert VocabularyDigest.of(tokenizer_json(WORDS, kind="Unigram")) == VocabularyDigest.of(tokenizer_json(WORDS))


def _first_differing(first: bytes, second: bytes, run: int | None = None) -> int | None:
    """As a scheduler finds it: the run by its digest, then the id by its own."""
    if run is None:
        runs = [VocabularyDigest.of(content).run_digests for content in (first, second)]
        run = next(i for i in range(99) if runs[0][32 * i : 32 * i + 32] != runs[1][32 * i : 32 * i + 32])
    return first_differing_digest(run, *(id_digests(read_tokens(content), run) for content in (first, second)))


def test_token_order_and_special_flag_count() -> None:
    base = tokenizer_json(WORDS, special=("<end>",))
    swapped = tokenizer_json([*WORDS[:100], WORDS[101], WORDS[100], *WORDS[102:]], special=("<end>",))
    plain_end = tokenizer_json([*WORDS, "<end>"])
    digests = {VocabularyDigest.of(content).sha256 for content in (base, swapped, plain_end)}
    assert len(digests) == 3
    assert _first_differing(base, swapped) == 100
    assert _first_differing(base, plain_end) == 3000
    assert _first_differing(base, tokenizer_json(WORDS)) == 3000
    assert _first_differing(base, base, run=2) is None


def test_token_borders_count() -> None:
    one, other = tokenizer_json(["ab", "c"]), tokenizer_json(["a", "bc"])
    assert VocabularyDigest.of(one).sha256 != VocabularyDigest.of(other).sha256
    # A token that spells what stands between two others.
    one, other = tokenizer_json(["a\x01\0\0\0\0b"]), tokenizer_json(["a", "b"])
    assert VocabularyDigest.of(one).sha256 != VocabularyDigest.of(other).sha256


def test_run_digests_have_one_entry_for_each_1024_ids_and_gaps_keep_their_place() -> None:
    assert len(VocabularyDigest.of(tokenizer_json(WORDS)).run_digests) == 3 * 32
    gap = {"added_tokens": [{"id": 5 * RUN_LENGTH, "content": "<end>", "special": True}], "model": {"vocab": {"a": 0}}}
    assert len(VocabularyDigest.of(json.dumps(gap)).run_digests) == 6 * 32


def test_the_same_vocabulary_fits_whatever_the_padding() -> None:
    target = identity("big", tokenizer_json(WORDS, padding=128))
    draft = identity("small", tokenizer_json(WORDS, padding=8), Role.DRAFT)
    assert fit(draft, target).fits


def test_a_permuted_vocabulary_is_refused_with_both_names_and_the_run_that_differs() -> None:
    target = identity("big", tokenizer_json(WORDS))
    words = [*WORDS[:1500], WORDS[1501], WORDS[1500], *WORDS[1502:]]
    refusal = fit(identity("small", tokenizer_json(words), Role.DRAFT), target)
    assert not refusal.fits
    assert "small" in refusal.reason
    assert "big" in refusal.reason
    assert "first differing id between 1024 and 2047" in refusal.reason
    assert "\n" not in refusal.reason


def test_a_shorter_vocabulary_is_refused_where_it_ends() -> None:
    target = identity("big", tokenizer_json(WORDS))
    short = identity("small", tokenizer_json(WORDS[:2048]), Role.DRAFT)
    assert "first differing id between 2048 and 2999" in fit(short, target).reason


def test_without_run_digests_it_is_still_refused() -> None:
    target = identity("big", tokenizer_json(WORDS))
    draft = replace(identity("small", tokenizer_json(WORDS[:-1]), Role.DRAFT), vocabulary_run_digests=b"")
    assert not fit(draft, target).fits


def test_a_drafter_without_a_model_fits_every_target() -> None:
    ngram = Identity(worker_id="d", role=Role.DRAFT, model_name="ngram", drafter="ngram")
    assert fit(ngram, identity("big", tokenizer_json(WORDS))).fits


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"model": {}}', b'{"model": {"vocab": {}}}', b"\xff\xfe"])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidTokenizer):
        VocabularyDigest.of(content)


def test_lone_surrogates_are_digested() -> None:
    assert VocabularyDigest.of('{"model": {"vocab": {"\\ud800": 0}}}').size == 1


def test_no_torch_is_loaded() -> None:
    program = "import sys, specdec.vocabulary; sys.exit(any(name in sys.modules for name in ('torch', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
