"""The answer of the page's prompt box: each token with where it came from, and the guesses that it refuted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import Field

from scheduler.entries import Step
from scheduler.request import Speculation
from services.gateway import Gateway
from services.generation import (
    ChatMessage,
    ChatPrompt,
    ChoiceFinished,
    ChoiceStarted,
    TextPrompt,
    TextTokens,
    UserRequest,
)
from services.http.bodies import Count, Strict, Text
from services.http.token_text import Json
from services.rounds import RoundStore, SequenceRounds
from services.rounds_figures import used_up
from services.tokenizer import Tokenizer
from specdec.candidates import CandidateTree
from specdec.commit import TokenSource

SHOWN_STEPS = 64
"""How far back the step of an event is looked for; it is the last one, or nearly so."""


class AskBody(Strict):
    """chat None: where the model has a chat template. seed: digits, as JavaScript has no numbers so large."""

    prompt: Annotated[Text, Field(min_length=1)]
    chat: bool | None = None
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    temperature: float | None = None
    seed: Annotated[str, Field(pattern=r"^[0-9]{1,20}$")] | None = None
    speculation: Literal["auto", "on", "off"] = "auto"


class Ask:
    """One question of the page. `events` may be iterated once."""

    def __init__(self, gateway: Gateway, rounds: RoundStore, body: AskBody, request_id: str) -> None:
        self._gateway = gateway
        self._rounds = rounds
        self._body = body
        self._request_id = request_id
        self._sequence_id = ""
        self._token_ids: list[int] = []

    async def events(self) -> AsyncGenerator[Json, None]:
        """`start`, `tokens`..., `end`; or raises a RequestError."""
        body = self._body
        model = await self._gateway.model("")
        chat = body.chat if body.chat is not None else model.template is not None
        request = UserRequest(
            ChatPrompt((ChatMessage("user", body.prompt),)) if chat else TextPrompt(body.prompt),
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            seed=None if body.seed is None else int(body.seed),
            speculation=Speculation(body.speculation),
            request_id=self._request_id,
        )
        async with aclosing(self._gateway.generate(request)) as events:
            async for event in events:
                if isinstance(event, ChoiceStarted):
                    self._sequence_id = event.sequence_id
                    yield _start(event)
                elif isinstance(event, TextTokens):
                    yield self._tokens(event, model.tokenizer)
                else:
                    yield _end(event)

    def _tokens(self, event: TextTokens, tokenizer: Tokenizer) -> Json:
        """rejected: by depth, the texts of the candidates that the last of these tokens refuted. Text without tokens is
        what was held back to the end."""
        content: Json = {
            "type": "tokens",
            "position": event.position,
            "pieces": list(event.pieces) if event.token_ids else [event.text],
            "sources": [source.value for source in event.sources] if event.token_ids else ["held"],
        }
        if TokenSource.CORRECTION in event.sources:
            rejected = self._rejected(event)
            content["rejected"] = [[_text(tokenizer, token_id) for token_id in depth] for depth in rejected]
        self._token_ids += event.token_ids
        return content

    def _rejected(self, event: TextTokens) -> list[list[int]]:
        rounds = self._rounds.sequence(self._sequence_id)
        step = _step_at(rounds, event.position) if rounds else None
        if rounds is None or step is None or step.draft is None:
            return []
        before = used_up(step, rounds.admitted.prompt_tokens)
        walked = [*self._token_ids[event.position - before : event.position], *step.token_ids[: step.accepted]]
        left = step.draft.candidates.below(walked)
        return _by_depth(left) if left is not None else []


def _step_at(rounds: SequenceRounds, position: int) -> Step | None:
    for entry, _ in zip(reversed(rounds.entries), range(SHOWN_STEPS), strict=False):
        if isinstance(entry, Step) and entry.position == position:
            return entry
    return None


def _by_depth(tree: CandidateTree) -> list[list[int]]:
    depths: list[list[int]] = [[] for _ in range(tree.draft_length)]
    for token_id, depth in zip(tree.token_ids, tree.depths, strict=True):
        if token_id not in depths[depth]:
            depths[depth].append(token_id)
    return depths


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _start(event: ChoiceStarted) -> Json:
    return {
        "type": "start",
        "sequence": event.sequence_id,
        "model": event.model,
        "seed": str(event.seed),
        "prompt_tokens": event.prompt_tokens,
    }


def _end(event: ChoiceFinished) -> Json:
    speculation = event.speculation
    return {
        "type": "end",
        "finish_reason": event.finish_reason.value,
        "tokens": event.completion_tokens,
        "seconds": event.duration,
        "first_token_seconds": event.time_to_first_token,
        "mode": speculation.mode,
        "acceptance_rate": speculation.acceptance_rate,
        "tokens_per_verify": speculation.mean_acceptance_length,
        "rounds": speculation.num_drafts,
        "plain_steps": speculation.num_plain_steps,
    }
