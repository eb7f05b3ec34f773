"""`outrider models list|fetch|verify|rm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from services.cli.fetching import FetchView, fetch_shown
from services.cli.tables import new_table, print_tables
from services.model_check import check_model
from services.models import ModelNotAvailable, list_models, resolve
from services.models import fetch as fetch_model
from services.models import remove as remove_model
from services.start_error import ExitCode, StartError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A name that `outrider models list` shows.")]


@app.callback()
def models() -> None:
    """List, fetch and remove named models. They lie in $OUTRIDER_HOME (default ~/.cache/outrider).

    Hub ids and local folders need no fetching: give them where a model is asked for.
    """


@app.command("list")
def list_() -> None:
    """Show name, size, folder, and whether it is there."""
    table = new_table(("name", "there", "download", "on disk", "license", "folder"))
    for entry in list_models():
        size = entry.size_bytes if entry.present else entry.source.disk_bytes
        table.add_row(
            entry.source.name,
            "yes" if entry.present else "no",
            f"{entry.source.download_bytes / 1e6:.0f} MB",
            f"{size / 1e9:.2f} GB",
            entry.source.license,
            str(entry.folder),
        )
    print_tables(table)


@app.command()
def fetch(name: Name) -> None:
    """Download, check and convert a named model. Goes on where an interrupted call ended."""
    view = FetchView(name)
    try:
        with view:
            folder = fetch_model(name, view)
    except ModelNotAvailable as error:
        raise StartError(str(error)) from error
    print(folder)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Named source, hub id, local folder or GGUF file.")],
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch a named source that is not there.")] = False,
) -> None:
    """Check that a model on disk is whole: its files, their lengths, and their sums if it has a file SHA256SUMS."""
    try:
        folder = fetch_shown(model) if fetch else resolve(model)
        compared = check_model(folder)
    except ModelNotAvailable as error:
        raise StartError(str(error)) from error
    sums = f"{compared} files are what SHA256SUMS says" if compared else "no SHA256SUMS to compare with"
    print(f"{model}: whole; {sums}", file=sys.stderr)
    print(folder)


@app.command()
def rm(name: Name) -> None:
    """Remove a named model from disk."""
    try:
        found = remove_model(name)
    except ModelNotAvailable as error:
        raise StartError(str(error), ExitCode.WRONG_USE) from error
    print(f"{name}: removed" if found else f"{name}: was not there", file=sys.stderr)
