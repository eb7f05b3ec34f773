"""A prompt as token ids: text as it is, messages and tools through the model's chat template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from scheduler.errors import InvalidRequest
from services.generation import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt, Tool, ToolCall
from services.loaded_model import LoadedModel
from services.tools import takes_tools

INLINE_CHARACTERS = 4096
"""Longer texts are tokenised in a thread, so that the event loop goes on."""
MAX_CHARACTERS_PER_TOKEN = 256
"""A text with more per token of context cannot fit, and is refused before it is tokenised."""


async def prompt_token_ids(prompt: Prompt | None, model: LoadedModel, context_length: int) -> tuple[int, ...]:
    """Raises InvalidRequest for an empty prompt, and for one that leaves no room in the context (0: unknown)."""
    if prompt is None:
        raise InvalidRequest("prompt", "there is no prompt: give text, messages or token ids")
    if isinstance(prompt, TokenPrompt):
        token_ids = prompt.token_ids
        _check_token_ids(token_ids, model.bundle.vocabulary_size)
    else:
        characters = _characters(prompt)
        if context_length and characters > context_length * MAX_CHARACTERS_PER_TOKEN:
            raise InvalidRequest(
                "prompt",
                f"the prompt has {characters} characters, which cannot fit the context of {model.name}: "
                f"{context_length} tokens",
            )
        if isinstance(prompt, ChatPrompt) or characters > INLINE_CHARACTERS:
            token_ids = await asyncio.to_thread(_tokenise, prompt, model)
        else:
            token_ids = _tokenise(prompt, model)
    if not token_ids:
        raise InvalidRequest("prompt", "the prompt is empty: it must have at least one token")
    if context_length and len(token_ids) >= context_length:
        raise InvalidRequest(
            "prompt",
            f"the prompt has {len(token_ids)} tokens, the context of {model.name} is {context_length} tokens: "
            f"at most {context_length - 1} leave room for an answer",
        )
    return token_ids


def echoed_text(prompt: Prompt | None, model: LoadedModel) -> str:
    """The prompt as an answer begins with it."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return model.tokenizer.decode(prompt.token_ids) if isinstance(prompt, TokenPrompt) else ""


def _characters(prompt: TextPrompt | ChatPrompt) -> int:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    messages = sum(
        len(message.role) + len(message.content) + sum(len(call.name + call.arguments) for call in message.tool_calls)
        for message in prompt.messages
    )
    return messages + sum(len(tool.name + tool.description + tool.parameters) for tool in prompt.tools)


def _tokenise(prompt: TextPrompt | ChatPrompt, model: LoadedModel) -> tuple[int, ...]:
    """Raises InvalidRequest."""
    try:
        if isinstance(prompt, TextPrompt):
            return tuple(model.tokenizer.encode(prompt.text)) if prompt.text else ()
        return tuple(model.tokenizer.encode(_rendered(prompt, model), add_special_tokens=False))
    except ValueError as error:
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        raise InvalidRequest(field, f"{field}: {error}") from None


def _rendered(prompt: ChatPrompt, model: LoadedModel) -> str:
    """Raises InvalidRequest, and ValueError if the template does."""
    if not prompt.messages:
        raise InvalidRequest("messages", "there are no messages: give at least one")
    if model.template is None:
        raise InvalidRequest("messages", f"{model.name} has no chat template: give a text prompt instead")
    if prompt.tools and not takes_tools(model.bundle.chat_template or ""):
        raise InvalidRequest("tools", f"tools must be left out: the chat template of {model.name} knows none")
    tools = [_tool(index, tool) for index, tool in enumerate(prompt.tools)] or None
    return model.template.render([_message(i, message) for i, message in enumerate(prompt.messages)], tools=tools)


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """As templates read it: what is empty is absent."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [_call(f"messages[{index}].tool_calls[{i}]", c) for i, c in enumerate(message.tool_calls)]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _call(path: str, call: ToolCall) -> dict[str, Any]:
    """Templates want arguments as a value, not as JSON text."""
    arguments = _object("messages", f"{path}.arguments", call.arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(index: int, tool: Tool) -> dict[str, Any]:
    if not tool.name:
        raise InvalidRequest("tools", f"tools[{index}].name is empty, must be the name of a function")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = _object("tools", f"tools[{index}].parameters", tool.parameters or "{}")
    return {"type": "function", "function": function}


def _object(field: str, path: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"{path} is no JSON, must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"{path} is {text[:40]}, must be a JSON object")
    return value


def _check_token_ids(token_ids: tuple[int, ...], vocabulary_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                "prompt", f"token {index} of the prompt is {token_id}, must be in [0, {vocabulary_size})"
            )
