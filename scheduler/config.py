"""The scheduler's settings, as one frozen value. Durations are in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """How the draft length is chosen."""

    FIXED = "fixed"
    """Always `draft_length`."""
    THRESHOLD = "threshold"
    """Longer above an acceptance of 0.85, shorter below 0.60, off below `off_below`; returns by probing."""
    GOODPUT = "goodput"
    """What gives the most committed tokens per second by what rounds were seen to cost; window and width too."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """scheduler_id: owner name in epochs. round_timeout: a target that shows no progress on a sequence for so long has
    lost it. width, window: with goodput the width is the widest that it may choose, and the window at most max_window.
    fan_out: with a window above 1, more blocks for each in it, for the likeliest ways in which the target may leave it.
    draft_timeout: a draft later than this is not waited for; min_draft_patience: shortest wait for a draft
    that is usually quick. admission_timeout: how long a request may wait for a live target or for room."""

    scheduler_id: str
    secret: bytes = b""
    policy: Policy = Policy.GOODPUT
    draft_length: int = 5
    max_draft_length: int = 16
    width: int = 1
    window: int = 1
    max_window: int = 8
    fan_out: int = 0
    off_below: float = 0.2
    acceptance_window: int = 8
    probe_after_tokens: int = 32
    round_timeout: float = 10.0
    draft_timeout: float = 2.0
    min_draft_patience: float = 0.1
    grant_tokens: int = 64
    admission_timeout: float = 30.0
    max_sequences: int = 256
    reconnect_delay: float = 0.25
    max_reconnect_delay: float = 2.0
    suspend_after_failures: int = 2
    failure_window: float = 10.0
    suspend_time: float = 2.0
