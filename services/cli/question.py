"""What `outrider generate` asks, checked before anybody is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.start_error import ExitCode, StartError
from specdec.candidates import MAX_CANDIDATES
from specdec.params import SamplingParams

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


@dataclass(frozen=True, slots=True)
class Question:
    """None: not given, and the deployment's default holds. chat None: chat where the model has a template. Names are
    those of the SDK's options; the server judges what is not checked here."""

    prompt: str
    model: str = ""
    chat: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    logprobs_of: str = "raw"
    echo: bool = False
    accept_rule: str | None = None
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    lark: str | None = None
    speculation: str = "auto"
    draft_length: int | None = None
    timeout: float | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    def plain(self, seed: int | None) -> Question:
        """The same without speculation."""
        return replace(self, speculation="off", draft_length=None, seed=seed)

    def check(self, compare: bool = False) -> None:
        """Raises StartError that names the field and its range. compare: it is asked again with the same seed."""
        if not self.prompt:
            raise StartError("the prompt is empty: give some text", ExitCode.WRONG_USE)
        given = {name: getattr(self, name) for name in _SAMPLING}
        try:
            replace(SamplingParams(), **{name: value for name, value in given.items() if value is not None}).validate()
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
        if compare and self.choices != 1:
            raise StartError(f"n is {self.n}, must be left out with --compare", ExitCode.WRONG_USE)
        if compare and self.accept_rule not in (None, "invariant"):
            raise StartError(
                f"accept_rule is {self.accept_rule}, must be invariant with --compare: under the others no seed gives "
                "the same text",
                ExitCode.WRONG_USE,
            )


def read_biases(texts: Sequence[str]) -> dict[int, float]:
    """From `ID=BIAS`. Raises StartError."""
    biases: dict[int, float] = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise StartError(f"logit_bias is {text!r}, must be ID=BIAS, e.g. 50=-100", ExitCode.WRONG_USE) from None
    return biases


def read_file(field_name: str, path: Path | None) -> str | None:
    """Raises StartError."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartError(f"{field_name}: cannot read {path}: {reason}", ExitCode.WRONG_USE) from None
