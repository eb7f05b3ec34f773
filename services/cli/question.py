"""What `outrider generate` asks, checked before anybody is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.start_error import ExitCode, StartError
from specdec.candidates import MAX_CANDIDATES
from specdec.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Question:
    """None: not given, and the deployment's default holds. chat None: chat where the model has a template."""

    prompt: str
    model: str = ""
    chat: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    speculation: str = "auto"
    draft_length: int | None = None
    timeout: float | None = None

    def plain(self, seed: int | None) -> Question:
        """The same without speculation."""
        return replace(self, speculation="off", draft_length=None, seed=seed)

    def check(self) -> None:
        """Raises StartError that names the field and its range."""
        if not self.prompt:
            raise StartError("the prompt is empty: give some text", ExitCode.WRONG_USE)
        sampling = SamplingParams()
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        try:
            replace(sampling, **{name: value for name, value in given.items() if value is not None}).validate()
        except ValueError as error:
            raise StartError(str(error), ExitCode.WRONG_USE) from error
        if self.max_tokens is not None and self.max_tokens < 1:
            raise StartError(f"max_tokens is {self.max_tokens}, must be 1 or more", ExitCode.WRONG_USE)
        if self.draft_length is not None and not 1 <= self.draft_length <= MAX_CANDIDATES:
            raise StartError(
                f"draft_length is {self.draft_length}, must be in [1, {MAX_CANDIDATES}]; --speculation off is plain",
                ExitCode.WRONG_USE,
            )
        if self.timeout is not None and not self.timeout > 0:
            raise StartError(f"timeout is {self.timeout:g}, must be more than 0 seconds", ExitCode.WRONG_USE)
