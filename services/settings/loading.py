"""Reads a role's settings: built-in default < YAML file < environment < flag, and tells where each came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource

from services.settings.base import RoleSettings
from services.settings.environment import ENV_PREFIX, is_service_link, unknown_variable
from services.settings.scheduler import SchedulerSettings
from services.settings.up import UpSettings
from services.settings.workers import DraftSettings, TargetSettings

KINDS: tuple[type[RoleSettings], ...] = (UpSettings, SchedulerSettings, TargetSettings, DraftSettings)
CONFIG_VARIABLE = "OUTRIDER_CONFIG"
SECTIONS = tuple(kind.section for kind in KINDS)
MASKED = ("secret", "api_keys")
"""Settings that are never shown, and never given on a command line."""

Settings = TypeVar("Settings", bound=RoleSettings)


class SettingsError(ValueError):
    """A setting is wrong; the message is one line that names it, where it came from, and what is allowed."""


class Origin(Enum):
    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Settings]):
    """sources: for each field where its value came from, e.g. "flag --threads" or "environment OUTRIDER_THREADS"."""

    settings: Settings
    origins: Mapping[str, Origin]
    sources: Mapping[str, str]

    def given(self, field: str) -> bool:
        return self.origins[field] is not Origin.DEFAULT


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def config_path(path: Path | None) -> Path | None:
    """The file to read: `path`, else the one that OUTRIDER_CONFIG names, else none."""
    named = os.environ.get(CONFIG_VARIABLE)
    return path if path is not None else Path(named) if named else None


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """Sections of a settings file. Raises SettingsError on bad YAML and on sections that do not exist."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not YAML: {' '.join(str(error).split())}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {path} must hold sections: {', '.join(SECTIONS)}")
    for name, section in content.items():
        if name not in SECTIONS:
            raise SettingsError(f"unknown section {name!r} in {path}; sections are {', '.join(SECTIONS)}")
        if not isinstance(section, dict | None):
            raise SettingsError(f"section {name!r} in {path} must hold `name: value` lines")
    return {name: section or {} for name, section in content.items()}


def load(
    kind: type[Settings],
    path: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    without_common: frozenset[str] = frozenset(),
) -> Loaded[Settings]:
    """Effective settings of one role. `flags`: those given on the command line (None: not given).

    `OUTRIDER_<ROLE>_<FIELD>` comes before `OUTRIDER_<FIELD>`; fields in `without_common` are not read from the latter.
    Raises SettingsError.
    """
    if problem := unknown_variable(os.environ, KINDS):
        raise SettingsError(problem)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(kind.model_fields, "default")
    origins = dict.fromkeys(kind.model_fields, Origin.DEFAULT)

    def take(found: Mapping[str, Any], origin: Origin, describe: Mapping[str, str]) -> None:
        for field, value in found.items():
            values[field], origins[field], sources[field] = value, origin, describe[field]

    path = config_path(path)
    section = read_file(path).get(kind.section, {}) if path is not None else {}
    _refuse_unknown(kind, section, path)
    take(section, Origin.FILE, dict.fromkeys(section, f"file {path}"))
    for prefix in (ENV_PREFIX, f"{ENV_PREFIX}{kind.section.upper()}_"):
        found = EnvSettingsSource(kind, env_prefix=prefix)()
        found = {field: value for field, value in found.items() if not _is_link(prefix + field.upper(), value)}
        if prefix == ENV_PREFIX:
            found = {field: value for field, value in found.items() if field not in without_common}
        take(found, Origin.ENVIRONMENT, {field: f"environment {prefix}{field.upper()}" for field in found})
    given = {field: value for field, value in (flags or {}).items() if value is not None}
    take(given, Origin.FLAG, {field: f"flag {flag_name(field)}" for field in given})
    try:
        return Loaded(kind(**values), origins, sources)
    except ValidationError as error:
        raise SettingsError(_first_line(error, sources)) from None


def shown(value: object, field: str) -> str:
    """A value as `config show` prints it: secrets are masked."""
    if field in MASKED:
        plain = value.get_secret_value() if isinstance(value, SecretStr) else value
        return "********" if plain else ""
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _is_link(name: str, value: object) -> bool:
    return isinstance(value, str) and is_service_link(name, value)


def _refuse_unknown(kind: type[RoleSettings], section: Mapping[str, Any], path: Path | None) -> None:
    for field in section:
        if field not in kind.model_fields:
            raise SettingsError(
                f"unknown setting {field!r} in section {kind.section!r} of {path}; "
                f"`outrider config show {kind.section}` lists those that exist"
            )


def _first_line(error: ValidationError, sources: Mapping[str, str]) -> str:
    """The first complaint of pydantic as one line that names field, value and source."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not field:
        return message
    value = "" if field in MASKED else f" is {first['input']!r}"
    return f"{field}{value} ({sources.get(field, 'unknown')}): {message.replace('input should', 'it must')}"
