"""Seeds of the choices of one request."""

from __future__ import annotations

import hashlib


def choice_seed(seed: int, index: int) -> int:
    """Of choice `index`, in [0, 2^64): that of choice 0 is `seed` itself, so that it is the answer of n = 1."""
    if index == 0:
        return seed
    content = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"outrider choice").digest(), "little")
