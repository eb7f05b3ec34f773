"""`commit`: what of an accepted block is appended to the log. The plain and the speculative path both use it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specdec.params import StopConditions
from specdec.value import value


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class TokenSource(Enum):
    """Where a committed token came from."""

    __hash__ = object.__hash__  # every token is looked up by it, and `Enum` computes its own in Python

    ACCEPTED = "accepted"
    """A candidate that equalled the target's own token."""
    CORRECTION = "correction"
    """The target's token where no candidate equalled it."""
    BONUS = "bonus"
    """The target's token after the last candidate of a fully accepted path."""
    PLAIN = "plain"
    """Decoded without candidates."""


@value
class CommittedTokens:
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


def commit(log_length: int, token_ids: Sequence[int], stop: StopConditions, context_length: int) -> CommittedTokens:
    """Applies the stops token by token, in this order: stop token -> token budget -> context limit.

    log_length: tokens before the block. The stop token itself is committed; nothing behind it is.
    """
    end = log_length + len(token_ids)
    if end < stop.max_length and end < context_length and stop.stop_token_ids.isdisjoint(token_ids):
        return CommittedTokens(tuple(token_ids), None)  # most go on
    for count, token_id in enumerate(token_ids, start=1):
        length = log_length + count
        if token_id in stop.stop_token_ids and length > stop.min_length:
            return CommittedTokens(tuple(token_ids[:count]), FinishReason.STOP)
        if length >= stop.max_length or length >= context_length:
            return CommittedTokens(tuple(token_ids[:count]), FinishReason.LENGTH)
    return CommittedTokens(tuple(token_ids), None)
