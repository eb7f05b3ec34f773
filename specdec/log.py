"""The sequence log: the prompt plus the committed tokens. It only grows; everything else is a replica of it.

Each part keeps a `Log` per sequence, and `place` is the one rule by which a message is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specdec import digest


class Place(Enum):
    """Where a message's (base_length, prefix_digest) lies in a log."""

    HERE = "here"
    """On the log, same digest."""
    BEYOND = "beyond"
    """Past its end: hold the block, or ask for the missing tokens."""
    STALE = "stale"
    """On the log, other digest."""


class Log:
    """Token ids with the digest of every prefix, so that any base can be checked in O(1)."""

    def __init__(self, root: bytes, token_ids: Sequence[int] = (), secret: bytes = b"") -> None:
        self._secret = secret
        self.token_ids: list[int] = []
        self._digests: list[bytes] = [root]
        self.append(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def root(self) -> bytes:
        return self._digests[0]

    @property
    def digest(self) -> bytes:
        return self._digests[-1]

    def digest_at(self, length: int) -> bytes:
        """Digest of the first `length` tokens, 0 <= length <= len(self)."""
        return self._digests[length]

    def append(self, token_ids: Sequence[int]) -> None:
        self._digests += digest.chain(self._digests[-1], token_ids, self._secret)
        self.token_ids += token_ids

    def roll_back(self, length: int) -> None:
        """Forget everything behind the first `length` tokens. For a draft worker's tail only: a target never does."""
        del self.token_ids[length:]
        del self._digests[length + 1 :]

    def place(self, base_length: int, prefix_digest: bytes) -> Place:
        if base_length > len(self.token_ids):
            return Place.BEYOND
        return Place.HERE if self._digests[base_length] == prefix_digest else Place.STALE

    def since(self, base_length: int) -> list[int]:
        """Tokens behind the first `base_length`."""
        return self.token_ids[base_length:]
