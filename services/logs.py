"""Log lines: for people on a terminal (time, level where it is not info, what happened, details), and elsewhere one
JSON object per line. Under a launcher each line for people gets the role in front.

Nothing of a prompt or an answer is logged unless `log_prompts` asks for it: what raises while a request is served may
hold parts of it, so such an error is told by its class and where it came from, without its message.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from services.log_fields import add_trace, hide_content, show_content
from specdec.log_extra import PRIVATE

if TYPE_CHECKING:
    from services.settings import ServingSettings

LAUNCHED_VARIABLE = "OUTRIDER_LAUNCHED"
"""Set by the launcher for its children: it puts the role in front of their lines and writes the files."""
FILE_BYTES = 10 * 2**20
FILE_COUNT = 3
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_CHATTY = ("asyncio", "grpc")
"""Their debug lines tell of event loops, dozens for each start."""
_ROLE_COLOURS = {"scheduler": "36", "target": "32", "draft": "35", "up": "34"}
_ONLY_FOR_MACHINES = ("role", "instance", "logger", "sequence_id")
"""People read these in front of the line or in its words."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """level: debug, info, warning or error. format: text, json or auto. folder: of the files; None: no files.
    instance: the worker's or scheduler's id. prompts: what users send and get may be logged."""

    level: str = "info"
    format: str = "auto"
    folder: Path | None = None
    instance: str = ""
    prompts: bool = False

    @classmethod
    def of(cls, settings: ServingSettings, instance: str) -> LogConfig:
        return cls(settings.log_level, settings.log_format, settings.log_dir, instance, settings.log_prompts)

    @property
    def is_json(self) -> bool:
        if self.format == "auto":
            return not sys.stderr.isatty() and not os.environ.get(LAUNCHED_VARIABLE)
        return self.format == "json"


def use_colours(stream: TextIO) -> bool:
    """Only on a terminal, and not if NO_COLOR is set to anything (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def role_prefix(role: str, colours: bool) -> str:
    """`[target-1] `, coloured by kind of role on a terminal."""
    colour = _ROLE_COLOURS.get(role.split("-")[0])
    return f"\x1b[{colour}m[{role}]\x1b[0m " if colours and colour else f"[{role}] "


def bounded_file(folder: Path, role: str) -> logging.handlers.RotatingFileHandler:
    """The log file of one role: at most FILE_COUNT files of FILE_BYTES. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return logging.handlers.RotatingFileHandler(
        folder / f"{role}.log", maxBytes=FILE_BYTES, backupCount=FILE_COUNT - 1, encoding="utf-8"
    )


def configure(role: str, config: LogConfig | None = None) -> None:
    """Sets up structlog and the standard `logging` of this process to write lines to stderr, and to the folder.

    Call once, first thing in a process. Raises OSError if the folder cannot be written.
    """
    config = config or LogConfig()
    launched = bool(os.environ.get(LAUNCHED_VARIABLE))
    colours = use_colours(sys.stderr)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].setFormatter(_formatter(role, config, "" if launched else role_prefix(role, colours), colours))
    if config.folder is not None and not launched:
        handlers.append(bounded_file(config.folder, role))
        handlers[1].setFormatter(_formatter(role, config, "", False))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    level = _LEVELS[config.level]
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.INFO))
    structlog.configure(
        processors=[*_shared(config), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def _shared(config: LogConfig) -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(("sequence_id", "traceparent", "prompt", "answer", PRIVATE)),
        structlog.processors.TimeStamper("iso" if config.is_json else "%H:%M:%S", utc=config.is_json),
        add_trace,
    ]


def _formatter(role: str, config: LogConfig, prefix: str, colours: bool) -> structlog.stdlib.ProcessorFormatter:
    content = show_content if config.prompts else hide_content
    last: Any = _Json(role, config.instance) if config.is_json else _Text(prefix, colours)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(config),
        processors=[content, structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
    )


class _Text:
    def __init__(self, prefix: str, colours: bool) -> None:
        self._prefix = prefix
        self._render = structlog.dev.ConsoleRenderer(
            colors=colours, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
        )

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        if event.get("level") == "info":  # as nearly every line; the others stand out
            del event["level"]
        for key in _ONLY_FOR_MACHINES:
            event.pop(key, None)
        line: str | bytes | Mapping[str, Any] | tuple[Any, ...] = self._render(logger, name, event)
        return self._prefix + str(line)


class _Json:
    def __init__(self, role: str, instance: str) -> None:
        self._who = {"role": role, "instance": instance} if instance else {"role": role}
        self._render = structlog.processors.JSONRenderer(ensure_ascii=False)

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        event = structlog.processors.format_exc_info(logger, name, event)
        first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
        return str(self._render(logger, name, {**first, **self._who, **event}))
