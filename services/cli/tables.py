"""Tables on stdout: fitted to a terminal, never cut where a program or a file reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

FILE_WIDTH = 400


def new_table(columns: Sequence[str], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_tables(*tables: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    for table in tables:
        console.print(table)
