"""`outrider report`: a page that needs nothing else, of benchmark results or of what a deployment did lately."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import interruptible
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption
from services.cli.control import control
from services.cli.report_benchmark import Benchmark, InvalidResult
from services.cli.report_span import Span
from services.start_error import ExitCode, StartError

DEFAULT_OUTPUT = Path("outrider-report.html")
MAX_SECONDS = 60

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Benchmark results (docs/benchmarks/NAME.json); none: a deployment.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML file to write; - is standard output.")
    ] = DEFAULT_OUTPUT,
    last: Annotated[
        int, typer.Option(help="Seconds of a deployment to look back.", min=1, max=MAX_SECONDS, metavar="SECONDS")
    ] = MAX_SECONDS,
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
) -> None:
    """Write one HTML file with tables and charts: of benchmark results, or of the last seconds of a deployment."""
    if results:
        content = page("Benchmark results", benchmarks=[_read(path) for path in results])
    else:
        content = page("Deployment", span=interruptible.run(_look(Connection(address, api_key, tls_ca), last)))
    if str(output) == "-":
        print(content)
        return
    try:
        output.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StartError(f"cannot write {output}: {error.strerror}") from error
    print(f"wrote {output}", file=sys.stderr)


def page(title: str, **parts: Any) -> str:
    """Every text in it is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("services.cli", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    known = {"benchmarks": [], "span": None, **parts}
    return environment.get_template("report.html.jinja").render(title=title, made_at=made_at, **known)


def _read(path: Path) -> Benchmark:
    try:
        return Benchmark.of(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}", ExitCode.WRONG_USE) from error
    except (ValueError, InvalidResult) as error:
        raise StartError(f"{path} is no benchmark result: {error}", ExitCode.WRONG_USE) from error


async def _look(connection: Connection, seconds: int) -> Span:
    async with control(connection) as asked:
        figures, sequences = await asked.figures(seconds), await asked.rounds_within(seconds)
        return Span.of(await asked.status(0), figures, sequences)
