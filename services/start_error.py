"""Why a process cannot start, as one line for the user."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    WRONG_USE = 2
    INTERRUPTED = 130


class StartError(Exception):
    """The message is one line that says what is wrong and what to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
