"""What the worker processes of tests share: their arguments, and that they end with the test that started them."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from services.settings import WorkerSettings, load
from services.telemetry.tracing_start import WorkerTracing
from services.worker_lease import Leased, make_lease
from tools.table_law import TableLaw

SECRET = b"a secret of the tests"


def add_common_arguments(parser: argparse.ArgumentParser, worker_id: str) -> None:
    parser.add_argument("--listen", required=True, help="HOST:PORT or unix:PATH")
    parser.add_argument("--worker-id", default=worker_id)
    parser.add_argument("--config", type=Path, help="settings file of the role: its name and its lease")
    parser.add_argument("--vocabulary-size", type=int, default=64)
    parser.add_argument("--order", type=int, default=3, help="tokens that the law looks back")
    parser.add_argument("--sharpness", type=float, default=8.0)
    parser.add_argument("--salt", default="table", help="another salt is another model")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--otlp-endpoint", help="where spans go; none: nowhere")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per forward or draft")


def lease_of(
    kind: type[WorkerSettings], options: argparse.Namespace
) -> Callable[[Leased], Callable[[str], AbstractAsyncContextManager[object]] | None]:
    """What makes the lease that the settings file asks for, if there is one; takes the worker's name from there."""
    if options.config is None:
        return lambda worker: None
    settings = load(kind, options.config).settings
    options.worker_id = getattr(settings, "worker_id")  # noqa: B009
    return lambda worker: make_lease(settings, worker)


def tracing_of(options: argparse.Namespace, role: str) -> WorkerTracing | None:
    """Exports quickly: a test waits for the spans."""
    if options.otlp_endpoint is None:
        return None
    from services.telemetry.tracing import TracingConfig
    from services.telemetry.tracing_export import ExportLimits

    limits = ExportLimits(interval=0.02)
    return WorkerTracing.of(TracingConfig(options.otlp_endpoint, role, options.worker_id, limits=limits))


def law_of(options: argparse.Namespace) -> TableLaw:
    return TableLaw(options.vocabulary_size, options.order, options.sharpness, options.salt)


async def say_ready(address: str) -> None:
    """The line that the starter waits for."""
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()


def end_with_starter() -> None:
    """Ends this process at once when its standard input does: a test that is killed leaves nothing behind."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="end-with-starter", daemon=True).start()
