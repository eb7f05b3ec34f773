"""What a user asks of the gateway and what it answers, the same for gRPC and HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.request import Speculation, SpeculationSummary
from specdec.commit import FinishReason, TokenSource
from specdec.messages import TokenLogprobs
from specdec.params import AcceptRule, Grammar, LogprobsOf
from specdec.value import value


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Continued as it is, without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: a JSON schema as JSON text; empty: none."""

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """tool_calls: those that an assistant made. tool_call_id: of a tool, the call it answers. name: of a tool, or of a
    participant."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """tools: rendered through the chat template; calls in the answer are parsed."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class UserRequest:
    """As the user gave it. None: absent, and the default of the API holds. timeout: seconds from now.

    prompt None: none was given. model empty: the only one served. stop_token_ids: beside those of the model, which
    ignore_eos leaves out. bad_words: as text; bad_word_ids: more of them, as token ids. stop: the answer ends before
    the first of these texts, or behind it with include_stop_str_in_output. n: choices. top_logprobs: None for no
    logprobs, 0 for those of the answer's own tokens. logprobs_of None: raw. echo: the answer begins with the prompt.
    accept_rule None: the deployment's.
    """

    prompt: Prompt | None
    model: str = ""
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    logprobs_of: LogprobsOf | None = None
    echo: bool = False
    accept_rule: AcceptRule | None = None
    grammar: Grammar | None = None
    speculation: Speculation = Speculation.AUTO
    draft_length: int | None = None
    timeout: float | None = None
    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""


@value
class ChoiceStarted:
    """index: which of the n choices, here and in the events below. seed: with it the choice can be replayed exactly,
    unless its accept rule is one that tests ratios."""

    index: int
    sequence_id: str
    model: str
    seed: int
    prompt_tokens: int


@value
class TextTokens:
    """Committed tokens with what they add to the text: `pieces`, one per token, join to `text`. No piece ends inside a
    character or in what may yet become a stop text, so some are empty.

    An event without tokens has text alone: the prompt that is echoed, at position 0 and before all else, or what was
    held back to the end. logprobs: one per token if asked for.
    """

    index: int
    position: int
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    prefix_digest: bytes
    text: str
    pieces: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@value
class ChoiceFinished:
    """stop_text: the one that ended the answer, if one did. tool_calls: parsed from the answer if the prompt had tools.
    Durations are in seconds."""

    index: int
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationSummary
    duration: float
    time_to_first_token: float
    stop_text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


GatewayEvent = ChoiceStarted | TextTokens | ChoiceFinished
"""Of each choice: ChoiceStarted, TextTokens..., ChoiceFinished. Those of several choices come mixed."""
