"""What a policy decides for the next round of one sequence."""

from __future__ import annotations

from dataclasses import field

from specdec.value import value


@value
class Decision:
    """draft_length: candidates on the longest path; 0 is *off*: decode plainly. width: siblings of a candidate.
    window: blocks in flight. probe: the block is only asked for to learn from; the target does not wait for it.
    min_confidence: the drafter stops behind the candidate at which it is less sure of the whole path."""

    draft_length: int
    width: int = 1
    window: int = 1
    probe: bool = False
    min_confidence: float = field(default=0.0, compare=False)

    @property
    def off(self) -> bool:
        return self.draft_length == 0

    @property
    def rows(self) -> int:
        """Rows of a packed forward that verifying takes: the last committed token and every candidate."""
        return 1 + self.draft_length * self.width


OFF = Decision(0)
