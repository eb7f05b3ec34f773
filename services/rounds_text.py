"""What a sequence's journal says, in words that the terminal and the page share."""

from __future__ import annotations

from specdec.decision import Decision
from specdec.goodput import Explained

NO_REASONS = "the policies threshold and fixed look at acceptance alone and give no reasons"
NO_DRAFTER = "the latest request has no drafter: it asked for none, or none is live"

_FALLBACKS = {
    "late": "the draft was late: the target went on plainly",
    "failed": "the drafter failed: the target went on plainly",
}


def decision_text(decision: Decision) -> str:
    """E.g. `off`, `length 4`, `length 4, window 2`."""
    if decision.off:
        return "off"
    parts = [f"length {decision.draft_length}"]
    parts += [f"width {decision.width}"] if decision.width > 1 else []
    parts += [f"window {decision.window}"] if decision.window > 1 else []
    return ("probe of " if decision.probe else "") + ", ".join(parts)


def reason_text(explained: Explained) -> str:
    """One line: what was chosen and why."""
    chosen = decision_text(explained.decision)
    if explained.goodput > 0:
        expected = f"{explained.goodput:.1f} tokens/s expected, {explained.plain:.1f} plain"
        return f"{chosen}: {expected}" + (f" ({explained.note})" if explained.note else "")
    return f"{chosen}: {explained.note}" if explained.note else chosen


def fallback_text(reason: str) -> str:
    return _FALLBACKS.get(reason, f"fell back to plain decoding: {reason}")
