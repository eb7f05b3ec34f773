"""`outrider config show`: the effective settings and where each came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from services.cli.flags import CONFIG_HELP
from services.cli.tables import new_table, print_tables
from services.settings import DraftSettings, RoleSettings, SchedulerSettings, SettingsError, TargetSettings, UpSettings
from services.settings.loading import load, shown
from services.start_error import ExitCode, StartError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
KINDS: dict[str, type[RoleSettings]] = {
    kind.section: kind for kind in (UpSettings, SchedulerSettings, TargetSettings, DraftSettings)
}


@app.callback()
def config() -> None:
    """Show the effective settings and where each came from."""


@app.command()
def show(
    role: Annotated[str | None, typer.Argument(help="up, scheduler, target or draft; none: all.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP, metavar="FILE")] = None,
) -> None:
    """Print each setting, its value, and its source: default, file, environment or flag. Secrets are masked."""
    if role is not None and role not in KINDS:
        raise StartError(f"no role {role!r}: choose {', '.join(KINDS)}", ExitCode.WRONG_USE)
    try:
        print_tables(*(_table(KINDS[name], config) for name in ([role] if role is not None else KINDS)))
    except SettingsError as error:
        raise StartError(str(error), ExitCode.WRONG_USE) from error


def _table(kind: type[RoleSettings], path: Path | None) -> Table:
    loaded = load(kind, path)
    table = new_table(("setting", "value", "source"), title=kind.section)
    for field, source in loaded.sources.items():
        table.add_row(field, shown(getattr(loaded.settings, field), field), source)
    return table
