"""Chained digests of a log: `digest(n) = blake2b(digest(n-1) || token id)`, keyed by the deployment secret.

The same digest names a prefix in a message, a KV block at its last token, and a prefix in Redis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

DIGEST_BYTES = 16


def root_digest(secret: bytes, model_identity: str, salt: str = "") -> bytes:
    """Digest of the empty log of one model and one tenant (`salt`); 16 bytes."""
    identity = model_identity.encode()
    content = len(identity).to_bytes(4, "little") + identity + salt.encode()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=secret[:64], person=b"outrider-root").digest()


def extend(digest: bytes, token_id: int, secret: bytes) -> bytes:
    """Digest of the log that has one more token; 16 bytes."""
    content = digest + token_id.to_bytes(4, "little")
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=secret[:64]).digest()


@cache
def _keyed(secret: bytes) -> hashlib.blake2b:
    """To be copied: it has taken in the key."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=secret[:64])


def chain(digest: bytes, token_ids: Iterable[int], secret: bytes) -> list[bytes]:
    """Digests after each of `token_ids`, the first behind `digest`: `extend`, with the key taken in once."""
    keyed = _keyed(secret)
    digests: list[bytes] = []
    for token_id in token_ids:
        link = keyed.copy()
        link.update(digest + token_id.to_bytes(4, "little"))
        digest = link.digest()
        digests.append(digest)
    return digests
