"""What the bodies of completions and chat completions have in common.

A field is honoured or refused, never ignored. Accepted without effect are only labels, which by their meaning change
nothing of the answer, and fields at the one value that says "as it is".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_CHOICES = 128
MAX_STOPS = 64

Count = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**24)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """Numbers are numbers and texts are texts; what is unknown is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Strict):
    """vLLM's. One of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(Strict):
    name: str = Field("", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[list[Text], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)]


class GenerationBody(Strict):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """0 and -1 are off."""
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: list[TokenId] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logprobs_of: Literal["raw", "processed"] | None = None
    """Which law logprobs are of; raw unless given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    speculation: Literal["auto", "on", "off"] | None = None
    draft_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    accept_rule: Literal["invariant", "rejection", "block"] | None = None
    request_id: str | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Labels."""
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    skip_special_tokens: Literal[True] | None = None

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def obfuscated(self) -> bool:
        """On unless it is switched off, as at OpenAI."""
        return self.stream_options is None or self.stream_options.include_obfuscation is not False
