"""A drafter whose candidates are wrong, as a draft worker of `outrider up`: `-m bench.anti_drafter --config FILE`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services import draft_process
from services.settings import DraftSettings, load
from specdec.candidates import CandidateTree
from specdec.drafter import Abandoned, DraftJob, never
from specdec.messages import Identity, Role


@dataclass(slots=True)
class AntiDrafter:
    """Implements `specdec.drafter.Drafter`: ids by chance, of which one in `vocabulary_size` is right by accident.

    per_candidate: seconds that each takes.
    """

    vocabulary_size: int
    per_candidate: float = 0.0
    name: str = "anti"
    context_length: int = 0

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        time.sleep(self.per_candidate * max((job.draft_length for job in jobs), default=0))
        return [self._tree(job) for job in jobs]

    def release(self, sequence_id: str) -> None:
        """Holds nothing per sequence."""

    def _tree(self, job: DraftJob) -> CandidateTree:
        rng = random.Random(f"{job.sequence_id} {len(job.log)}")
        return CandidateTree.chain([rng.randrange(self.vocabulary_size) for _ in range(job.draft_length)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--draft-ms", type=float, default=0.0)
    parser.add_argument("--vocabulary-size", type=int, default=30_000, help="at most that of the target")
    options = parser.parse_args()

    def build(settings: DraftSettings) -> draft_process.Built:
        drafter = AntiDrafter(options.vocabulary_size, options.draft_ms / 1e3)
        return draft_process.Built(drafter, Identity(settings.worker_id, Role.DRAFT, "", drafter=drafter.name))

    draft_process.build_ngram = build
    return draft_process.run_draft(load(DraftSettings, options.config).settings)


if __name__ == "__main__":
    sys.exit(main())
