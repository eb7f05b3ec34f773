"""Log lines for people: time, level where it is not info, what happened, details. Under a launcher each line gets the
role in front."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog

LAUNCHED_VARIABLE = "OUTRIDER_LAUNCHED"
"""Set by the launcher for its children: it puts the role in front of their lines and writes the files."""
FILE_BYTES = 10 * 2**20
FILE_COUNT = 3
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_CHATTY = ("asyncio", "grpc")
"""Their debug lines tell of event loops, dozens for each start."""
_ROLE_COLOURS = {"scheduler": "36", "target": "32", "draft": "35", "up": "34"}


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


def configure(role: str, level: str = "info", log_dir: Path | None = None) -> None:
    """Sets up structlog and the standard `logging` of this process to write lines to stderr, and to `log_dir`.

    Call once, first thing in a process. Raises OSError if `log_dir` cannot be written.
    """
    launched = bool(os.environ.get(LAUNCHED_VARIABLE))
    colours = use_colours(sys.stderr)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].setFormatter(_formatter("" if launched else role_prefix(role, colours), colours))
    if log_dir is not None and not launched:
        handlers.append(bounded_file(log_dir, role))
        handlers[1].setFormatter(_formatter("", False))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.INFO))
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        cache_logger_on_first_use=False,
    )


def _shared() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
    ]


def _formatter(prefix: str, colours: bool) -> structlog.stdlib.ProcessorFormatter:
    console = structlog.dev.ConsoleRenderer(
        colors=colours, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
    )

    def render(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        if event.get("level") == "info":  # as nearly every line; the others stand out
            del event["level"]
        line: str | bytes | Mapping[str, Any] | tuple[Any, ...] = console(logger, name, event)
        return prefix + str(line)

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
    )
