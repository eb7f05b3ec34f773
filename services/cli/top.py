"""`outrider top`: a deployment at a glance, again and again."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.v1 import control_service_pb2 as pb
from services.cli import interruptible
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption
from services.cli.control import Control, control
from services.cli.status import as_dict, sequence_table, worker_table
from services.cli.tables import FILE_WIDTH

SHOWN_SEQUENCES = 20
BAR = 12

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def top(
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1, max=60)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
) -> None:
    """Show speed, acceptance, mode and why, workers and running sequences, until Ctrl-C."""
    connection = Connection(address, api_key, tls_ca)
    if as_json or once or not sys.stdout.isatty():
        interruptible.run(_once(connection, as_json))
    else:
        interruptible.run(_live(connection, interval))


async def _once(connection: Connection, as_json: bool) -> None:
    async with control(connection) as asked:
        status, figures = await _ask(asked)
    if as_json:
        print(json.dumps({"status": as_dict(status), "figures": figures_dict(figures)}))
    else:
        console = Console()
        (console if console.is_terminal else Console(width=FILE_WIDTH)).print(view(status, figures))


async def _live(connection: Connection, interval: float) -> None:
    async with control(connection) as asked:
        first = view(*await _ask(asked))
        with Live(first, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(interval)
                live.update(view(*await _ask(asked)), refresh=True)


async def _ask(asked: Control) -> tuple[pb.GetStatusResponse, pb.GetFiguresResponse]:
    return await asked.status(SHOWN_SEQUENCES), await asked.figures()


def figures_dict(figures: pb.GetFiguresResponse) -> dict[str, object]:
    """Fields as in the proto; what is not known is left out."""
    content: dict[str, object] = MessageToDict(
        figures, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return content


def view(status: pb.GetStatusResponse, figures: pb.GetFiguresResponse) -> Group:
    tables = [worker_table(status)] + ([sequence_table(status)] if status.sequences else [])
    return Group(*_lines(status, figures), *tables)


def _lines(status: pb.GetStatusResponse, figures: pb.GetFiguresResponse) -> list[Text]:
    state = ("ready", "green") if status.ready else ("not ready", "red")
    uptime = status.uptime.ToNanoseconds() / 1e9
    head = Text.assemble(
        ("outrider ", "bold"),
        status.version,
        "  ",
        state,
        f"  {status.active_sequences} active sequences  redis {status.metadata_state}  up for {uptime:.0f} s",
    )
    speed = Text.assemble(
        (f"{figures.tokens_per_second:.1f}", "bold"),
        f" tokens/s over {figures.seconds} s   ",
        (_known(figures, "tokens_per_verify", ".2f"), "bold"),
        " tokens per verify   acceptance ",
        (_known(figures, "acceptance_rate", ".0%"), "bold"),
        f"   ahead hits {figures.ahead_rounds}, stale blocks {figures.stale_blocks}",
    )
    rates = Text.assemble(
        "one sequence: ",
        (_known(figures, "speculative_rate", ".1f"), "bold"),
        " tokens/s speculating, ",
        (_known(figures, "plain_rate", ".1f"), "bold"),
        " plain   expected: ",
        _known(figures, "expected_rate", ".1f"),
        " against ",
        _known(figures, "expected_plain_rate", ".1f"),
    )
    mode = Text.assemble("mode ", (figures.mode, "bold"), f": {figures.reason}")
    return [head, speed, rates, mode, *_positions(figures)]


def _positions(figures: pb.GetFiguresResponse) -> list[Text]:
    """Acceptance of each candidate, as bars."""
    lines = []
    for depth, rate in enumerate(figures.acceptance_per_position, 1):
        filled = round(rate * BAR)
        bar = ("█" * filled, "green"), ("░" * (BAR - filled), "bright_black")
        lines.append(Text.assemble(f"candidate {depth:2d} ", *bar, f" {rate:.0%}"))
    return lines


def _known(figures: pb.GetFiguresResponse, field: str, form: str) -> str:
    return format(getattr(figures, field), form) if figures.HasField(field) else "-"  # type: ignore[arg-type]
