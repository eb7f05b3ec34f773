"""A worker process with a timed table model: `python -m bench.timed_workers --role target --listen unix:/path`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TextIO

from bench.journal import ROOT
from bench.timed_models import LAW, TimedDrafter, TimedModel

sys.path.insert(0, str(ROOT / "tests"))

from draft_worker.config import DraftConfig
from draft_worker.worker import DraftWorker
from services.telemetry.tracing_start import WorkerTracing
from services.worker_process import ServeOptions, serve_draft, serve_target
from target_worker.config import TargetConfig
from target_worker.worker import TargetWorker
from tools.identities import draft_identity, target_identity, tokenizer_bundle, words
from tools.process import SECRET, end_with_starter, say_ready
from tools.table_drafter import TableDrafter

CONTEXT = 4096


class IdleTimes:
    """A line for each forward: seconds that the worker's thread waited for work before it, seconds between it and the
    forward before, and rows that decide something."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._waited = 0.0
        self._last_end = 0.0

    def watch(self, worker: TargetWorker) -> None:
        wait = worker._mailbox.wait

        def watched(timeout: float | None) -> None:
            began = time.perf_counter()
            wait(timeout)
            self._waited += time.perf_counter() - began

        worker._mailbox.wait = watched  # type: ignore[method-assign]

    def told(self, began: float, ended: float, rows: int) -> None:
        self._out.write(f"{self._waited:.6f} {began - self._last_end:.6f} {rows}\n")
        self._out.flush()
        self._waited, self._last_end = 0.0, ended


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("target", "draft"), required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--seconds", type=float, default=0.01, help="of a forward or draft")
    parser.add_argument("--agreement", type=float, default=0.9, help="acceptance per token")
    parser.add_argument("--runner-up", type=float, default=0.0, help="share of errors with the right token second")
    parser.add_argument("--idle-file", type=Path)
    parser.add_argument("--otlp-endpoint", help="where spans go; none: nowhere")
    options = parser.parse_args()
    end_with_starter()
    asyncio.run(_target(options) if options.role == "target" else _draft(options))


async def _target(options: argparse.Namespace) -> None:
    identity = target_identity(options.worker_id, LAW.vocabulary_size, CONTEXT, "timed")
    times = IdleTimes(options.idle_file.open("w")) if options.idle_file else None
    model = TimedModel(options.seconds, context_length=CONTEXT, told=times.told if times else None)
    worker = TargetWorker(TargetConfig(options.worker_id, SECRET), model, identity)
    if times:
        times.watch(worker)
    await serve_target(
        worker, tokenizer_bundle(identity), options.listen, on_ready=say_ready, options=_serve_options(options)
    )


async def _draft(options: argparse.Namespace) -> None:
    drafter = TimedDrafter(TableDrafter(LAW, options.agreement, runner_up=options.runner_up), options.seconds)
    identity = draft_identity(options.worker_id, words(LAW.vocabulary_size), "table")
    worker = DraftWorker(DraftConfig(options.worker_id, SECRET), drafter, identity)
    await serve_draft(worker, options.listen, on_ready=say_ready, options=_serve_options(options))


def _serve_options(options: argparse.Namespace) -> ServeOptions:
    if options.otlp_endpoint is None:
        return ServeOptions(grace=5.0)
    from services.telemetry.tracing import TracingConfig

    config = TracingConfig(options.otlp_endpoint, options.role, options.worker_id)
    return ServeOptions(grace=5.0, tracing=WorkerTracing.of(config))


if __name__ == "__main__":
    main()
