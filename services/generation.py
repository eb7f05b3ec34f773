"""What a user asks of the gateway and what it answers, the same for gRPC and HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.request import Finished, Speculation, Started
from specdec.commit import TokenSource


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Continued as it is, without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class UserRequest:
    """As the user gave it. None: absent, and the default of the API holds. timeout: seconds from now.

    prompt None: none was given. model empty: the only one served. stop_token_ids: beside those of the model, which
    ignore_eos leaves out.
    """

    prompt: Prompt | None
    model: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: Speculation = Speculation.AUTO
    draft_length: int | None = None
    timeout: float | None = None
    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Committed tokens with what they add to the text: `pieces`, one per token, join to `text`. No piece ends inside a
    character, so some are empty."""

    position: int
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    prefix_digest: bytes
    text: str
    pieces: tuple[str, ...]


GatewayEvent = Started | TextTokens | Finished
