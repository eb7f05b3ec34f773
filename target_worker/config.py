"""The target worker's settings, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """token_budget: rows of one packed forward at most. prefill_chunk: rows of one sequence's prefill per forward.
    max_sequences: open at once. held_blocks: blocks per sequence held while their base is beyond the log."""

    worker_id: str
    secret: bytes = b""
    token_budget: int = 512
    prefill_chunk: int = 256
    max_sequences: int = 256
    held_blocks: int = 8
