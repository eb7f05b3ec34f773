"""`outrider trace`: the rounds of one request as lanes over time."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from outrider.v1 import control_service_pb2 as pb
from services.cli import interruptible
from services.cli.connection import DEFAULT_ADDRESS, AddressOption, ApiKeyOption, Connection, TlsCaOption
from services.cli.control import REQUEST_HELP, control
from services.cli.explain import notes_of
from services.cli.lanes import LEGEND, lanes_of
from services.cli.tables import FILE_WIDTH

MIN_WIDTH = 40
FALLBACK_WIDTH = 100

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def trace(
    request: Annotated[str, typer.Argument(help=REQUEST_HELP)],
    address: AddressOption = DEFAULT_ADDRESS,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Milliseconds of a column; none: what shows each round.", metavar="MS", min=0.01),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Columns; none: those of the terminal.", min=MIN_WIDTH, max=FILE_WIDTH)
    ] = None,
) -> None:
    """Show when each block was drafted, on its way, and verified, and what came of it."""
    found = interruptible.run(_ask(Connection(address, api_key, tls_ca), request))
    columns = width or max(shutil.get_terminal_size((FALLBACK_WIDTH, 0)).columns, MIN_WIDTH)
    console = Console(width=columns, highlight=False)
    console.print(Text.assemble(*LEGEND))
    for sequence in found:
        title = f"sequence {sequence.sequence_id}, {sequence.model}, {sequence.prompt_tokens} prompt tokens"
        console.print(Text(title, "bold"))
        for line in lanes_of(sequence, columns, None if scale is None else scale / 1e3):
            console.print(line)
        for note in notes_of(sequence):
            console.print(Text(note, "dim"))


async def _ask(connection: Connection, request: str) -> list[pb.SequenceRounds]:
    async with control(connection) as asked:
        return await asked.rounds(request)
