"""The seam behind which candidates are made: one verb per need, whatever the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.candidates import CandidateTree
from specdec.grammar import TokenMask
from specdec.log import Log
from specdec.params import SamplingParams, StopConditions


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Propose up to `draft_length` candidates on the longest path, at most `width` siblings, behind `log`.

    mask: of the sequence's grammar, if it has one. Where `sampling.accept_rule` tests ratios, every candidate needs the
    law it was drawn from. min_confidence: a drafter that knows how sure it is stops behind the candidate at which the
    product of its confidences falls below this.
    """

    sequence_id: str
    log: Log
    sampling: SamplingParams
    stop: StopConditions
    draft_length: int
    width: int = 1
    mask: TokenMask | None = None
    min_confidence: float = 0.0


Abandoned = Callable[[str], bool]
"""Whether the draft for this sequence need not be finished."""


def never(sequence_id: str) -> bool:
    return False


class Drafter(Protocol):
    """A source of candidates. Called from one thread only.

    A drafter keeps what it likes per sequence (KV, an index) and realigns it from `log` alone: the log may have
    been rolled back, extended, or both since the last call.
    """

    name: str
    context_length: int
    """Tokens it can read; jobs beyond it get no candidates. 0: no limit."""

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        """One tree per job, in order, the likeliest sibling first; an empty tree where it has nothing to propose.

        A drafter that takes long asks `abandoned(sequence_id)` between its tokens. Where that is true the job's log has
        changed under it: it stops at once, and what it returns for that job is not used.
        """
        ...

    def release(self, sequence_id: str) -> None:
        """Forget the sequence; unknown ids are ignored."""
        ...
