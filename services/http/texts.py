"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field, model_validator

from scheduler.errors import InvalidRequest
from services.generation import ChatPrompt
from services.http.bodies import Strict, Text, TokenId
from services.http.chat_body import MAX_MESSAGES, MAX_TOOLS, Message, ToolDefinition
from services.http.errors import bad_request
from services.http.token_text import Json
from services.loaded_model import LoadedModel
from services.prompts import prompt_token_ids

MAX_TOKENS = 2**20


class TokenizeBody(Strict):
    """A prompt, or messages: those go through the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _refuse_combinations(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("prompt", "prompt: give either prompt or messages")
        for index, message in enumerate(self.messages or ()):
            message.check(f"messages[{index}]")
        if self.messages is None and self.tools:
            raise bad_request("tools", "tools need messages")
        if self.messages is not None and self.add_special_tokens:
            raise bad_request("add_special_tokens", "add_special_tokens: the chat template has them already")
        return self


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


async def tokenize(body: TokenizeBody, model: LoadedModel, context_length: int) -> Json:
    """Raises a RequestError."""
    if body.messages is None:
        special = body.add_special_tokens is not False
        try:
            token_ids = await asyncio.to_thread(model.tokenizer.encode, body.prompt or "", add_special_tokens=special)
        except ValueError as error:
            raise InvalidRequest("prompt", f"prompt: {error}") from None
    else:
        messages = tuple(message.message() for message in body.messages)
        prompt = ChatPrompt(messages, tuple(definition.tool() for definition in body.tools or ()))
        token_ids = list(await prompt_token_ids(prompt, model, 0))
    tokens = [model.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
    texts = tokens if body.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": context_length, "tokens": token_ids, "token_strs": texts}


async def detokenize(body: DetokenizeBody, model: LoadedModel) -> Json:
    """Raises HttpError."""
    size = model.bundle.vocabulary_size
    for index, token_id in enumerate(body.tokens):
        if token_id >= size:
            raise bad_request("tokens", f"tokens[{index}] is {token_id}, must be in [0, {size})")
    return {"prompt": await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)}
