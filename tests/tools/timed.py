"""A worker whose table model takes as long as a model would: `python -m tools.timed target --listen unix:/a`.

What the tables themselves take is hidden in that time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import torch

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from services.worker_process import ServeOptions, serve_draft, serve_target
from specdec.candidates import CandidateTree
from specdec.drafter import Abandoned, DraftJob, never
from specdec.engine.model import Segment
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.identities import draft_identity, target_identity, tokenizer_bundle, words
from tools.process import SECRET, add_common_arguments, end_with_starter, law_of, say_ready
from tools.table_drafter import TableDrafter
from tools.table_model import TableModel


class TimedModel(TableModel):
    """A forward takes `base` seconds and `each` for every row."""

    base = 0.0
    each = 0.0

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        until = time.monotonic() + self.base + self.each * sum(len(segment.token_ids) for segment in segments)
        logits = super().forward(segments)
        time.sleep(max(until - time.monotonic(), 0))
        return logits


class TimedDrafter(TableDrafter):
    """A candidate of each sequence takes `base` seconds and `each` for every sequence."""

    base = 0.0
    each = 0.0

    def draft(self, jobs: Sequence[DraftJob], abandoned: Abandoned = never) -> list[CandidateTree]:
        length = max((job.draft_length for job in jobs), default=0)
        until = time.monotonic() + length * (self.base + self.each * len(jobs))
        trees = super().draft(jobs, abandoned)
        time.sleep(max(until - time.monotonic(), 0))
        return trees


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "draft"])
    add_common_arguments(parser, "timed")
    parser.add_argument("--base", type=float, required=True, help="seconds per forward, or per candidate")
    parser.add_argument("--each", type=float, required=True, help="seconds per row, or per candidate and sequence")
    parser.add_argument("--agreement", type=float, default=0.8)
    options = parser.parse_args()
    end_with_starter()
    serve_options = ServeOptions(grace=5.0)
    if options.role == "target":
        model = TimedModel(law_of(options), context_length=options.context_length)
        model.base, model.each = options.base, options.each
        identity = target_identity(options.worker_id, options.vocabulary_size, options.context_length)
        target = TargetWorker(TargetConfig(options.worker_id, SECRET), model, identity)
        bundle = tokenizer_bundle(identity)
        asyncio.run(serve_target(target, bundle, options.listen, on_ready=say_ready, options=serve_options))
        return
    drafter = TimedDrafter(law_of(options), options.agreement)
    drafter.base, drafter.each = options.base, options.each
    identity = draft_identity(options.worker_id, words(options.vocabulary_size), "timed")
    draft = DraftWorker(DraftConfig(options.worker_id, SECRET), drafter, identity)
    asyncio.run(serve_draft(draft, options.listen, on_ready=say_ready, options=serve_options))


if __name__ == "__main__":
    main()
