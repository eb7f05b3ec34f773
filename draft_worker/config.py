"""The draft worker's settings, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """max_batch: sequences drafted together. Plans beyond max_draft_length, max_width and max_window are trimmed.
    max_in_flight: blocks of a sequence in flight, those of its branches included: one that is verified, and as many
    as a target holds."""

    worker_id: str
    secret: bytes = b""
    max_batch: int = 64
    max_draft_length: int = 32
    max_width: int = 8
    max_window: int = 8
    max_in_flight: int = 9
    max_sequences: int = 1024
