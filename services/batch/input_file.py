"""The input file: checked as a whole before anything is asked, then read line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.batch.request import BatchRequest, InvalidLine, read_request
from services.start_error import ExitCode, StartError

SHOWN_COMPLAINTS = 10


class InvalidInput(StartError):
    """complaints: one line each, the first few."""

    def __init__(self, path: Path, complaints: list[str], count: int) -> None:
        lines = "1 line" if count == 1 else f"{count} lines"
        super().__init__(f"{path}: {lines} cannot be asked; nothing was", ExitCode.WRONG_USE)
        self.complaints = complaints


class InputFile:
    """begin, end: bytes of the file that are looked at, from the start of a line to the end of one; end None: all."""

    def __init__(self, path: Path, begin: int = 0, end: int | None = None) -> None:
        self._path = path
        self._begin = begin
        self._end = end

    def check(self) -> dict[str, str]:
        """The id of each request by its custom_id. Raises InvalidInput, StartError."""
        ids: dict[str, str] = {}
        lines: dict[str, int] = {}
        complaints: list[str] = []
        for number, line in self._lines():
            try:
                request = read_request(line)
                if request.custom_id in ids:
                    first = lines[request.custom_id]
                    raise InvalidLine(f"custom_id {request.custom_id} is there already, on line {first}")
                ids[request.custom_id] = request.id
                lines[request.custom_id] = number
            except InvalidLine as error:
                complaints.append(f"{self._path} line {number}: {error}")
        if complaints:
            raise InvalidInput(self._path, complaints[:SHOWN_COMPLAINTS], len(complaints))
        if not ids:
            raise StartError(f"{self._path} holds no request", ExitCode.WRONG_USE)
        return ids

    def requests(self) -> Iterator[BatchRequest]:
        """In the order of the file, which has been checked. Raises StartError."""
        for number, line in self._lines():
            try:
                yield read_request(line)
            except InvalidLine as error:
                raise StartError(f"{self._path} line {number} has changed meanwhile: {error}") from error

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered from 1; blank ones are left out."""
        position = self._begin
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                for number, line in enumerate(file, 1):
                    if self._end is not None and position >= self._end:
                        return
                    position += len(line)
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise StartError(f"cannot read {self._path}: {error.strerror}", ExitCode.WRONG_USE) from error
