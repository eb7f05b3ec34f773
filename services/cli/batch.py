"""`outrider batch`: asks a file of requests, in OpenAI's batch format."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.batch.batch import Batch, BatchConfig, Tally
from services.batch.input_file import InvalidInput
from services.batch.server import ServerConfig
from services.batch.view import BatchView
from services.cli import interruptible
from services.cli.connection import ApiKeyOption
from services.start_error import ExitCode, StartError

DEFAULT_URL = "http://127.0.0.1:8000"
MAX_CONCURRENCY = 1024

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def batch(
    input: Annotated[Path, typer.Argument(help="JSON lines with custom_id, method, url and body.")],
    output: Annotated[
        Path, typer.Argument(help="Gets one line per answer. If it is there, the batch goes on with it.")
    ],
    errors: Annotated[
        Path | None, typer.Option(help="Gets the requests that failed; none: OUTPUT with .errors before its ending.")
    ] = None,
    url: Annotated[str, typer.Option(envvar="OUTRIDER_URL", help="The HTTP API to ask.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", envvar="OUTRIDER_TLS_CA", help="PEM roots to trust; none: the system's."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at a time.", min=1, max=MAX_CONCURRENCY)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.", min=0.001)] = 600.0,
    patience: Annotated[float, typer.Option(help="Seconds that a server that is gone is waited for.", min=0.0)] = 60.0,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Over the Ray cluster of RAY_ADDRESS; OUTPUT is a folder that all of it sees.")
    ] = False,
    shard_mb: Annotated[
        float, typer.Option(help="With --ray: MB of the input in one shard; the same when it goes on.", min=0.0001)
    ] = 64.0,
) -> None:
    """Answer each request of a file once. The same command goes on after an interruption or a crash.

    Ends with 1 if a request failed. Failed ones are not asked again while they stand in the file of errors.
    """
    server = ServerConfig(url, api_key, tls_ca, timeout, patience, connections=concurrency)
    config = BatchConfig(input, output, errors or errors_beside(output), server, concurrency)
    with BatchView() as view:
        running = Batch(config, view)
        try:
            if on_ray:
                running.tally = _on_ray(config, shard_mb, view)
            else:
                interruptible.run(running.run())
        except InvalidInput as error:
            for complaint in error.complaints:
                print(complaint, file=sys.stderr)
            raise
        finally:
            if running.tally.total:
                print(f"{view.state(running.tally)}, {view.seconds:.1f} s, {view.rate(running.tally)}", file=sys.stderr)
    _refuse_failures(running.tally, output if on_ray else config.errors)


def _on_ray(config: BatchConfig, shard_mb: float, view: BatchView) -> Tally:
    try:
        from services.batch.on_ray import run_on_ray
    except ImportError as error:
        raise StartError(f"--ray needs `pip install 'outrider[ray]'`: {error}") from error
    return run_on_ray(config, round(shard_mb * 1e6), os.environ.get("RAY_ADDRESS"), view)


def errors_beside(output: Path) -> Path:
    """out.jsonl -> out.errors.jsonl"""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def _refuse_failures(tally: Tally, errors: Path) -> None:
    if tally.failed:
        raise StartError(f"{tally.failed} of {tally.total} requests failed: see {errors}", ExitCode.FAILED)
