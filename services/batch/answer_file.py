"""A file of answers, one line each, and the only record of what has been answered: a whole line is an answer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.batch.request import InvalidLine, read_object
from services.start_error import ExitCode, StartError

_BEGIN = b'{"id": "batch_req_'


class AnswerFile:
    """Open for one process at a time. `ids`: of what it holds, by custom_id."""

    def __init__(self, path: Path) -> None:
        """Reads what is there, and cuts off what a crash left of its last line. Raises StartError."""
        self._path = path
        self.ids: dict[str, str] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StartError(f"cannot write {path}: {error.strerror}", ExitCode.WRONG_USE) from error
        try:
            self._lock()
            whole = self._read()
            os.ftruncate(self._file, whole)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, custom_id: str, answer: Mapping[str, Any]) -> None:
        """In one piece, so that a crash leaves all of it or a line without an end. Raises StartError."""
        line = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise StartError(f"cannot write {self._path}: {error.strerror}") from error
        self.ids[custom_id] = str(answer["id"])

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StartError(f"cannot lock {self._path}: {error.strerror}") from error
            raise StartError(f"{self._path} is being written by another batch", ExitCode.WRONG_USE) from None

    def _read(self) -> int:
        """Bytes of whole lines."""
        whole = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    whole += len(line)
                    self._take(number, line)
                elif line[: len(_BEGIN)] != _BEGIN[: len(line)]:
                    raise self._foreign(number)
        return whole

    def _take(self, number: int, line: bytes) -> None:
        try:
            answer = read_object(line)
            custom_id, answer_id = answer["custom_id"], answer["id"]
        except (InvalidLine, KeyError):
            raise self._foreign(number) from None
        if not isinstance(custom_id, str) or not isinstance(answer_id, str):
            raise self._foreign(number)
        if custom_id in self.ids:
            raise StartError(f"{self._path} line {number}: custom_id {custom_id} is answered twice", ExitCode.WRONG_USE)
        self.ids[custom_id] = answer_id

    def _foreign(self, number: int) -> StartError:
        text = (
            f"{self._path} line {number} is no answer of a batch: give a new file, or the one of an interrupted batch"
        )
        return StartError(text, ExitCode.WRONG_USE)
