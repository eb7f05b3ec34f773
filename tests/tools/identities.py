"""Who the workers of a test say they are, with a vocabulary of made-up words: "w0 w1 w2 ..."."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specdec.messages import Identity, Role, TokenizerBundle
from specdec.vocabulary import VocabularyDigest


def words(count: int) -> list[str]:
    return [f"w{token_id}" for token_id in range(count)]


def tokenizer_json(vocabulary: Sequence[str]) -> bytes:
    """A tokenizer.json that takes text apart at blanks; an unknown word becomes id 0."""
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(vocabulary)}, "unk_token": vocabulary[0]}
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return json.dumps(content).encode()


def target_identity(
    worker_id: str, vocabulary_size: int = 64, context_length: int = 512, model_name: str = "table"
) -> Identity:
    digest = VocabularyDigest.of(tokenizer_json(words(vocabulary_size)))
    return Identity(
        worker_id,
        Role.TARGET,
        model_name,
        digest.size,
        digest.sha256,
        digest.run_digests,
        context_length=context_length,
        dtype="float32",
    )


def draft_identity(
    worker_id: str, vocabulary: Sequence[str] = (), drafter: str = "model", context_length: int = 0
) -> Identity:
    """An empty vocabulary: a drafter without a model."""
    if not vocabulary:
        return Identity(worker_id, Role.DRAFT, "", context_length=context_length, drafter=drafter)
    digest = VocabularyDigest.of(tokenizer_json(vocabulary))
    return Identity(
        worker_id,
        Role.DRAFT,
        "table-draft",
        digest.size,
        digest.sha256,
        digest.run_digests,
        context_length=context_length,
        drafter=drafter,
    )


def tokenizer_bundle(identity: Identity, stop_token_ids: tuple[int, ...] = ()) -> TokenizerBundle:
    return TokenizerBundle(
        identity.model_name,
        tokenizer_json(words(identity.vocabulary_size)),
        chat_template=None,
        bos_token_id=None,
        stop_token_ids=stop_token_ids,
        context_length=identity.context_length,
        vocabulary_size=identity.vocabulary_size,
    )
