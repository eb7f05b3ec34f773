"""Where answers go, as at OpenAI: to the output file what was answered, to the file of errors what failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.batch.answer_file import AnswerFile
from services.batch.request import BatchRequest
from services.start_error import ExitCode, StartError


@dataclass(frozen=True, slots=True)
class Answered:
    """status 0: the server gave no answer, and `error` says why. body: the server's JSON. tokens: of the answer."""

    status: int = 0
    request_id: str = ""
    body: Mapping[str, Any] | None = None
    error: Mapping[str, str] | None = None

    @property
    def failed(self) -> bool:
        return self.status != 200

    @property
    def tokens(self) -> int:
        usage = (self.body or {}).get("usage") or {}
        return int(usage.get("completion_tokens") or 0)

    def line(self, request: BatchRequest) -> dict[str, Any]:
        response = None
        if self.status:
            response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": self.error}


@dataclass(slots=True)
class Output:
    """`open` first, and `close` in the end."""

    path: Path
    errors_path: Path
    _answers: AnswerFile | None = field(default=None, init=False)
    _errors: AnswerFile | None = field(default=None, init=False)

    def open(self, wanted: Mapping[str, str]) -> None:
        """wanted: id of each request by custom_id. Raises StartError if what is there answers something else."""
        try:
            self._answers = AnswerFile(self.path)
            if self.errors_path.exists():
                self._errors = AnswerFile(self.errors_path)
            for path, file in ((self.path, self._answers), (self.errors_path, self._errors)):
                _compare(path, file.ids if file else {}, wanted)
            twice = sorted(self._answers.ids.keys() & self._failed.keys())
            if twice:
                text = f"{twice[0]} is answered both in {self.path} and in {self.errors_path}"
                raise StartError(f"custom_id {text}", ExitCode.WRONG_USE)
        except BaseException:
            self.close()
            raise

    @property
    def num_failed(self) -> int:
        return len(self._failed)

    @property
    def num_answered(self) -> int:
        """The failed ones included."""
        return self.num_failed + (len(self._answers.ids) if self._answers else 0)

    def holds(self, custom_id: str) -> bool:
        return custom_id in self._failed or (self._answers is not None and custom_id in self._answers.ids)

    def write(self, request: BatchRequest, answered: Answered) -> None:
        """Raises StartError."""
        if answered.failed and self._errors is None:
            self._errors = AnswerFile(self.errors_path)
        file = self._errors if answered.failed else self._answers
        if file is not None:
            file.append(request.custom_id, answered.line(request))

    def close(self) -> None:
        for file in (self._answers, self._errors):
            if file is not None:
                file.close()
        self._answers = self._errors = None

    @property
    def _failed(self) -> dict[str, str]:
        return self._errors.ids if self._errors else {}


def _compare(path: Path, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for custom_id, answer_id in found.items():
        if custom_id not in wanted:
            raise StartError(f"{path} answers {custom_id}, which the input does not hold: {_CURE}", ExitCode.WRONG_USE)
        if wanted[custom_id] != answer_id:
            raise StartError(f"{path} answers {custom_id} as it was before it changed: {_CURE}", ExitCode.WRONG_USE)


_CURE = "restore the input, or give another output file"
