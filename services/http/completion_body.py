"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from services.generation import Prompt, TextPrompt, TokenPrompt
from services.http.bodies import GenerationBody, TokenId
from services.http.errors import bad_request

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5


class CompletionBody(GenerationBody):
    """prompt: a text, a list of token ids, or a list of either; choices of prompt i have the indices from i * n on."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _of_one_kind(cls, value: Any) -> Any:
        """pydantic would complain once for each kind that it is not."""
        items = value if isinstance(value, list) else [value]
        kinds = {type(item) for item in items}
        if not isinstance(value, str) and (not isinstance(value, list) or kinds not in ({str}, {int}, {list})):
            raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")
        if kinds != {int} and len(items) > MAX_PROMPTS:
            raise ValueError(f"holds {len(items)} prompts, must hold at most {MAX_PROMPTS}")
        return value

    @model_validator(mode="after")
    def _refuse_combinations(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of", f"best_of is {self.best_of}, must be n, which is {self.n or 1}, or left out")
        return self

    def prompts(self) -> tuple[Prompt, ...]:
        if isinstance(self.prompt, str):
            return (TextPrompt(self.prompt),)
        first = self.prompt[0]
        if isinstance(first, int):
            return (TokenPrompt(tuple(item for item in self.prompt if isinstance(item, int))),)
        return tuple(TextPrompt(item) if isinstance(item, str) else TokenPrompt(_ids(item)) for item in self.prompt)


def _ids(item: int | list[int]) -> tuple[int, ...]:
    return (item,) if isinstance(item, int) else tuple(item)
