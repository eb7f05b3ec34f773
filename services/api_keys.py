"""The keys that let a caller in, for gRPC and HTTP."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

SCHEME = "bearer "
REFUSAL = "no valid API key: send `authorization: Bearer KEY`"


class ApiKeys:
    """Kept and compared as hashes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def allow(self, authorization: str) -> bool:
        """Whether this `authorization` header carries one of the keys. Compares with every key, so that the time tells
        nothing."""
        if not authorization.lower().startswith(SCHEME):
            return False
        digest = _digest(authorization[len(SCHEME) :].strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
