"""`outrider`: the entry point. Commands are imported when they are used, so that `--help` answers at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

# The gRPC core prints lines of its own before our message; it reads this when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer
from typer.core import TyperCommand, TyperGroup

from services.start_error import ExitCode, StartError


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """module.app is the typer application of the command."""

    module: str
    help: str


COMMANDS = {
    "up": LazyCommand("services.cli.up", "Start scheduler, target workers and draft workers on this machine."),
    "demo": LazyCommand("services.cli.demo", "Start everything, stream one answer, show the figures, end."),
    "generate": LazyCommand("services.cli.generate", "Ask a running deployment for text."),
    "batch": LazyCommand("services.cli.batch", "Ask a running deployment a file of requests, each once."),
    "status": LazyCommand("services.cli.status", "Show workers, leases and load of a running deployment."),
    "top": LazyCommand("services.cli.top", "Show speed, acceptance, mode and workers, again and again."),
    "explain": LazyCommand("services.cli.explain", "Show the rounds of a request, and why each was decided so."),
    "trace": LazyCommand("services.cli.trace", "Show the rounds of a request as lanes over time."),
    "report": LazyCommand("services.cli.report", "Write a page of benchmark results, or of the last minute."),
    "replay": LazyCommand("services.cli.replay", "Decode an answer that the audit found wrong again."),
    "models": LazyCommand("services.cli.models", "List, fetch and remove named models."),
    "config": LazyCommand("services.cli.config", "Show the effective settings and where each came from."),
    "scheduler": LazyCommand("services.cli.scheduler", "Run the scheduler and gateway alone, for containers."),
    "target": LazyCommand("services.cli.target", "Run one target worker alone, for containers."),
    "draft": LazyCommand("services.cli.draft", "Run one draft worker alone, for containers."),
}


class LazyGroup(TyperGroup):
    """Lists its commands without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=lazy.help) for name, lazy in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        application = importlib.import_module(COMMANDS[name].module).app
        return name, typer.main.get_command(application), rest


app = typer.Typer(cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _print_version(wanted: bool) -> None:
    if wanted:
        from services.cli.version import version_lines

        for line in version_lines():
            print(line)
        raise typer.Exit


@app.callback(no_args_is_help=True)
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and devices.")
    ] = False,
) -> None:
    """Serves large language models with distributed speculative decoding.

    First steps: `outrider models fetch smollm2-135m`, `outrider up`, and in a second terminal
    `outrider generate "Once upon a time"`.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code. What goes wrong is one line on stderr."""
    try:
        code = app(list(arguments), prog_name="outrider", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except StartError as error:
        return fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except typer.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        # typer's own errors, of a class that it does not export, know how to say what was wrong.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return fail(f"{format_message()} (`{_path(error)} --help` lists what there is)", ExitCode.WRONG_USE)


def _path(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return str(context.command_path) if context is not None else "outrider"


def fail(message: str, code: ExitCode) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
