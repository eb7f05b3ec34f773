"""Who the workers of a test say they are, with vocabularies of made-up tokens."""

from __future__ import annotations

import hashlib

from specdec.messages import Identity, Role, TokenizerBundle

RUN = 1024


def vocabulary_digests(size: int, tokens: str = "token") -> tuple[str, bytes]:
    """(sha256 over all ids as hex, sha256 of each run of 1,024 ids) of ids 0 to size - 1 named `tokens`."""
    lines = [f"{token_id}:{tokens}{token_id}:0\n".encode() for token_id in range(size)]
    runs = [hashlib.sha256(b"".join(lines[start : start + RUN])).digest() for start in range(0, size, RUN)]
    return hashlib.sha256(b"".join(lines)).hexdigest(), b"".join(runs)


def target_identity(
    worker_id: str, vocabulary_size: int = 64, context_length: int = 512, model_name: str = "table"
) -> Identity:
    sha256, runs = vocabulary_digests(vocabulary_size)
    return Identity(
        worker_id,
        Role.TARGET,
        model_name,
        vocabulary_size,
        sha256,
        runs,
        context_length=context_length,
        dtype="float32",
    )


def draft_identity(
    worker_id: str, vocabulary_size: int = 64, tokens: str = "token", drafter: str = "model", context_length: int = 0
) -> Identity:
    """vocabulary_size 0: a drafter without a model. Other `tokens` make another vocabulary of the same size."""
    sha256, runs = vocabulary_digests(vocabulary_size, tokens) if vocabulary_size else ("", b"")
    return Identity(
        worker_id,
        Role.DRAFT,
        "table-draft" if vocabulary_size else "",
        vocabulary_size,
        sha256,
        runs,
        context_length=context_length,
        drafter=drafter,
    )


def tokenizer_bundle(identity: Identity, stop_token_ids: tuple[int, ...] = ()) -> TokenizerBundle:
    return TokenizerBundle(
        identity.model_name,
        b"{}",
        chat_template=None,
        bos_token_id=None,
        stop_token_ids=stop_token_ids,
        context_length=identity.context_length,
        vocabulary_size=identity.vocabulary_size,
    )
