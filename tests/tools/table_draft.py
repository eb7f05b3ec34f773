"""A draft worker process without a real model: `python -m tools.table_draft --listen unix:/path`."""

from __future__ import annotations

import argparse
import asyncio

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from services.settings import DraftSettings
from services.worker_process import ServeOptions, serve_draft
from specdec.drafter import Drafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from tools.identities import draft_identity, words
from tools.process import SECRET, add_common_arguments, end_with_starter, law_of, lease_of, say_ready, tracing_of
from tools.table_drafter import TableDrafter
from tools.table_model import TableModel


def main() -> None:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, "draft")
    parser.add_argument("--drafter", choices=["table", "model", "ngram"], default="table")
    parser.add_argument("--agreement", type=float, default=0.8)
    options = parser.parse_args()
    make_lease = lease_of(DraftSettings, options)
    drafter = _drafter(options)
    vocabulary = [] if options.drafter == "ngram" else words(options.vocabulary_size)
    identity = draft_identity(options.worker_id, vocabulary, options.drafter)
    end_with_starter()
    worker = DraftWorker(DraftConfig(options.worker_id, SECRET), drafter, identity)
    asyncio.run(
        serve_draft(
            worker,
            options.listen,
            on_ready=say_ready,
            lease=make_lease(worker),
            options=ServeOptions(grace=5.0, tracing=tracing_of(options, "draft")),
        )
    )


def _drafter(options: argparse.Namespace) -> Drafter:
    if options.drafter == "ngram":
        return NgramDrafter()
    if options.drafter == "model":
        return ModelDrafter(TableModel(law_of(options), context_length=options.context_length, delay=options.delay))
    return TableDrafter(law_of(options), options.agreement)


if __name__ == "__main__":
    main()
