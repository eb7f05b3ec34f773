"""The body of /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.generation import ChatMessage, ChatPrompt, Tool, ToolCall
from services.http.bodies import Count, GenerationBody, Strict, Text
from services.http.errors import bad_request

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20

Nothing = Annotated[list[Any], Field(max_length=0)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class FunctionCalled(Strict):
    name: Name
    arguments: Text


class ToolCallMade(Strict):
    id: str
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCalled


class Message(Strict):
    """An assistant's own message can be sent back as it came, with all its empty fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMade] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def message(self) -> ChatMessage:
        """Templates know no developer: that is what OpenAI calls the system now."""
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, self.text, calls, self.tool_call_id or "", self.name or "")

    def check(self, path: str) -> None:
        """Raises HttpError."""
        if self.content is None and not self.tool_calls:
            raise bad_request(f"{path}.content", f"{path}.content: this field is required")
        if self.tool_calls and self.role != "assistant":
            raise bad_request(f"{path}.tool_calls", f"{path}.tool_calls: only an assistant makes calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            text = "the message of a tool says which call it answers, and no other does"
            raise bad_request(f"{path}.tool_call_id", f"{path}.tool_call_id: {text}")
        for index, call in enumerate(self.tool_calls or ()):
            _check_arguments(f"{path}.tool_calls[{index}].function.arguments", call.function.arguments)


class FunctionDefinition(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        parameters = "" if self.function.parameters is None else json.dumps(self.function.parameters)
        return Tool(self.function.name, self.function.description or "", parameters)


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _refuse_combinations(self) -> ChatBody:
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_completion_tokens", "max_completion_tokens and max_tokens differ: give one")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [definition.function.name for definition in self.tools or ()]
        twice = next((index for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            raise bad_request("tools", f"tools[{twice}].function.name: {names[twice]} is there twice")
        for field in ("tool_choice", "parallel_tool_calls"):
            if not names and getattr(self, field) not in (None, "none", "auto"):
                raise bad_request(field, f"{field} needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise bad_request("tool_choice", f"tool_choice: {name} is not among tools, which are {', '.join(names)}")
        for index, definition in enumerate(self.tools or ()):
            if definition.function.strict and not self.forced_tools and self.tools_in_use:
                path = f"tools[{index}].function.strict"
                text = "the arguments are held to the schema with tool_choice required, or that function, only"
                raise bad_request(path, f"{path}: {text}")

    @property
    def tools_in_use(self) -> tuple[ToolDefinition, ...]:
        """With tool_choice none the model is not told of any."""
        return () if self.tool_choice == "none" else tuple(self.tools or ())

    @property
    def forced_tools(self) -> tuple[ToolDefinition, ...]:
        """Those of which the answer has to call one; empty if it is free."""
        if self.tool_choice == "required":
            return tuple(self.tools or ())
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return tuple(definition for definition in self.tools or () if definition.function.name == name)
        return ()

    def prompt(self) -> ChatPrompt:
        return ChatPrompt(
            tuple(message.message() for message in self.messages),
            tuple(definition.tool() for definition in self.tools_in_use),
        )


def _check_arguments(path: str, arguments: str) -> None:
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise bad_request(path, f"{path}: must be a JSON object as text")
