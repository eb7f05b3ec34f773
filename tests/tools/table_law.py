"""A next-token law that is a hash of the last few tokens: no model library, exact, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

CACHED_CONTEXTS = 1 << 16


class Law(Protocol):
    """What a table model computes."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def order(self) -> int:
        """Tokens that it looks back."""
        ...

    def logits(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of the token behind `context`: [vocabulary_size], float32. Read-only."""
        ...


@dataclass(frozen=True)
class TableLaw:
    """Logits as a pure function of the last `order` tokens.

    vocabulary_size: real ids, the columns of `logits`. padding: columns behind them, which always score highest, so
    that a missing cut shows at once. sharpness: logits spread evenly over [0, sharpness), so that about
    vocabulary_size / sharpness tokens carry the mass. salt: another salt is another model.
    """

    vocabulary_size: int = 64
    order: int = 3
    sharpness: float = 8.0
    salt: str = "table"
    padding: int = 0
    _cache: dict[tuple[int, ...], npt.NDArray[np.float32]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def logits(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of the token behind `context`: [vocabulary_size], float32. Read-only."""
        key = tuple(context[-self.order :])
        row = self._cache.get(key)
        if row is None:
            row = self._compute(key)
            if len(self._cache) < CACHED_CONTEXTS:
                self._cache[key] = row
        return row

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        content = repr((self.salt, key)).encode()
        seed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        columns = self.vocabulary_size + self.padding
        bits = _mix(np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed))
        # 24 bits fit a float32 mantissa, so the product is the only rounding and every machine gets the same bits.
        uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        row = uniform * np.float32(self.sharpness)
        row[self.vocabulary_size :] += np.float32(2 * self.sharpness)
        cut = row[: self.vocabulary_size].copy()
        cut.setflags(write=False)
        return cut


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
