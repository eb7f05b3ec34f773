"""The noise that target and drafter share: a pure function of (seed, absolute position, token id).

`r = PRF(seed, position, token_id)` is 32 bits of integer arithmetic, so it is the same on every device and for every
vocabulary padding. `e = -log1p(-(r + 1/2) / 2^32)` is a standard exponential, and the next token is
`argmax(probs / e)`, which is `argmax(log p + g)` with Gumbel noise `g = -log e`: a draw from `probs`, and the same draw
for everyone who has nearly the same `probs`.

Daliri, Musco, Suresh: "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Words = TypeVar("_Words", Tensor, NDArray[np.int32])
_MASK64 = (1 << 64) - 1


def _mix64(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK64
    return word ^ (word >> 31)


def _position_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of one position of one request, as signed int32 values."""
    word = _mix64((_mix64((seed + 0x9E3779B97F4A7C15) & _MASK64) + position * 0xD1B54A32D192ED03) & _MASK64)
    return _as_int32(word >> 32), _as_int32(word & 0xFFFFFFFF)


def _as_int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix32(words: _Words) -> None:
    """A bijective 32-bit mixing of int32 words, in place: xor-shift-multiply with low bias; multiplication wraps."""
    words ^= (words >> 16) & 0xFFFF
    words *= 0x7FEB352D
    words ^= (words >> 15) & 0x1FFFF
    words *= _as_int32(0x846CA68B)
    words ^= (words >> 16) & 0xFFFF


def random_bits(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """`r` for each of `token_ids` (any integer dtype): int64 in [0, 2^32), same shape and device."""
    return _widened(_mixed(*_position_keys(seed, position), token_ids.to(torch.int32)))


def random_words(seed: int, position: int, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
    """`r` for each of `token_ids`, on a CPU, where numpy makes no copies."""
    return _mixed(*_position_keys(seed, position), token_ids).view(np.uint32)


def _mixed(key_high: int | Tensor, key_low: int | Tensor, token_ids: _Words) -> _Words:
    words = token_ids ^ key_low
    _mix32(words)
    words += key_high
    _mix32(words)
    return words


def _widened(words: Tensor) -> Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF


class Domain(Enum):
    """What uniforms are for. Each purpose has its own, none of them the shared noise of `invariant`."""

    DRAFT = 1
    """A drafter's draws under the rules that test ratios."""
    ACCEPT = 2
    """The tests of candidates."""
    RESIDUAL = 3
    """The target's own draws: plain, correction and bonus."""


def uniforms(seed: int, domain: Domain, base_length: int, count: int) -> Tensor:
    """`count` uniforms in (0, 1), float64, 53 bits each, for one block on top of `base_length` tokens.

    A base is verified once, so no uniform is ever used for two decisions: what one round saw and threw away does not
    bias the next.
    """
    key = _mix64((_mix64((seed + domain.value * 0xA0761D6478BD642F) & _MASK64) + base_length) & _MASK64)
    high = random_bits(key, 0, torch.arange(count)).to(torch.float64)
    low = (random_bits(key, 1, torch.arange(count)) >> 11).to(torch.float64)
    return (high * 2.0**21 + low + 0.5) * 2.0**-53


def exponential(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """`e` for each of `token_ids`: float32 > 0, same shape and device.

    Computed in float64 and rounded, so that torch, numpy and libm agree in every bit.
    """
    return _exponential(random_bits(seed, position, token_ids))


def exponential_rows(places: Sequence[tuple[int, int]], vocabulary_size: int, device: torch.device) -> Tensor:
    """`e` for every token id at each (seed, position): float32 [places, vocabulary_size], made on the device."""
    keys = torch.tensor([_position_keys(seed, position) for seed, position in places], dtype=torch.int32)
    if device.type == "cuda":
        keys = keys.pin_memory().to(device, non_blocking=True)
    token_ids = torch.arange(vocabulary_size, dtype=torch.int32, device=device)
    return _exponential(_widened(_mixed(keys[:, :1], keys[:, 1:], token_ids)))


def _exponential(bits: Tensor) -> Tensor:
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log1p(-uniform)).to(torch.float32)


def exponential_of(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """`e` for each `r`."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log1p(-uniform)).astype(np.float32)
