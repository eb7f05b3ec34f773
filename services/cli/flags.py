"""Turns a settings model into a command: one flag per field, described as there, checked there."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from services.settings import RoleSettings, SettingsError
from services.settings.loading import MASKED, flag_name, shown
from services.start_error import ExitCode, StartError

Flags = dict[str, Any]
Run = Callable[[Path | None, Flags], int]

CONFIG_HELP = "Settings file (YAML); none: the one that OUTRIDER_CONFIG names."


def settings_app(kinds: Mapping[type[RoleSettings], Iterable[str] | None], help_text: str, run: Run) -> typer.Typer:
    """A typer application of one command.

    kinds: models and the fields of each that get a flag; None is all. Secrets get none: command lines are public.
    run(config file, flags that were given) returns the exit code; SettingsError becomes wrong use.
    """
    parameters = [_option("config", Path | None, CONFIG_HELP, "", "FILE")]
    for kind, chosen in kinds.items():
        fields = kind.model_fields if chosen is None else {name: kind.model_fields[name] for name in chosen}
        parameters += [_field_option(name, field) for name, field in fields.items() if name not in MASKED]

    def command(**values: Any) -> None:
        config = values.pop("config")
        given = {name: value for name, value in values.items() if value is not None and value != []}
        try:
            code = run(config, given)
        except SettingsError as error:
            raise StartError(str(error), ExitCode.WRONG_USE) from error
        raise typer.Exit(code)

    command.__doc__ = help_text
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


def _field_option(name: str, field: FieldInfo) -> inspect.Parameter:
    kinds = _plain_kinds(field.annotation)
    default = "" if field.default_factory is not None else shown(field.default, name)
    help_text = (field.description or "") + (f" [default: {default}]" if default not in ("", "-") else "")
    if bool in kinds:
        return _option(name, bool | None, help_text, "", None)
    if tuple in kinds:
        return _option(name, list[str] | None, help_text, "", "TEXT,...")
    metavar = "INTEGER" if int in kinds else "NUMBER" if float in kinds else "PATH" if Path in kinds else "TEXT"
    return _option(name, str | None, help_text, "", metavar)


def _option(name: str, annotation: Any, help_text: str, default: str, metavar: str | None) -> inspect.Parameter:
    flag = flag_name(name)
    option = typer.Option(None, flag, help=help_text, metavar=metavar, show_default=default or False)
    if annotation == bool | None:
        option = typer.Option(None, f"{flag}/--no-{flag[2:]}", help=help_text, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _plain_kinds(annotation: Any) -> set[Any]:
    """The classes an annotation is made of: int | None -> {int, NoneType}."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _plain_kinds(part)}
    return {get_origin(annotation) or annotation}
