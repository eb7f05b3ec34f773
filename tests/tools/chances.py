"""A scripted drafter's luck: each candidate right with a chance that may change along the sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.candidates import CandidateTree
from specdec.drafter import DraftJob


@dataclass(frozen=True, slots=True)
class RightBy:
    """The candidate of a position is right with `chance(position)`; the same position always has the same luck, so
    that what is drafted there does not depend on time."""

    chance: Callable[[int], float]
    vocabulary_size: int
    seed: int = 0

    def __call__(self, job: DraftJob, continuation: Sequence[int]) -> CandidateTree:
        start = len(job.log)
        return CandidateTree.chain(
            token_id if self._lucky(start + i) else (token_id + 1) % self.vocabulary_size
            for i, token_id in enumerate(continuation[: job.draft_length])
        )

    def _lucky(self, position: int) -> bool:
        return random.Random(f"{self.seed} {position}").random() < self.chance(position)
