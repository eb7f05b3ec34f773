"""A target worker process with a table model: `python -m tools.table_target --listen unix:/path`."""

from __future__ import annotations

import argparse
import asyncio

from services.settings import TargetSettings
from services.worker_process import ServeOptions, serve_target
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.identities import target_identity, tokenizer_bundle
from tools.process import SECRET, add_common_arguments, end_with_starter, law_of, lease_of, say_ready, tracing_of
from tools.table_model import Fault, FaultKind, TableModel


def main() -> None:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, "target")
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--model-name", default="table")
    parser.add_argument("--stop-token", type=int, action="append", default=[])
    parser.add_argument("--fault", action="append", default=[], metavar="KIND:MARKER:LENGTH", type=_fault)
    parser.add_argument("--max-sequences", type=int, default=256)
    options = parser.parse_args()
    make_lease = lease_of(TargetSettings, options)
    model = TableModel(
        law_of(options),
        name=options.model_name,
        context_length=options.context_length,
        blocks_total=options.blocks,
        faults=options.fault,
        delay=options.delay,
    )
    identity = target_identity(options.worker_id, options.vocabulary_size, options.context_length, options.model_name)
    config = TargetConfig(options.worker_id, SECRET, max_sequences=options.max_sequences)
    bundle = tokenizer_bundle(identity, tuple(options.stop_token))
    end_with_starter()
    worker = TargetWorker(config, model, identity)
    asyncio.run(
        serve_target(
            worker,
            bundle,
            options.listen,
            on_ready=say_ready,
            lease=make_lease(worker),
            options=ServeOptions(grace=5.0, tracing=tracing_of(options, "target")),
        )
    )


def _fault(text: str) -> Fault:
    kind, marker, length = text.split(":")
    return Fault(FaultKind(kind), int(marker), int(length))


if __name__ == "__main__":
    main()
