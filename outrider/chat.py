"""Messages and tools, given in OpenAI's form, on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb


def encode_chat(chat: pb.ChatPrompt, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequest for what is of another form."""
    chat.SetInParent()
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if not ({"role", "content"} <= message.keys() or ("role" in message and calls)):
            raise InvalidRequest(f"messages[{index}] must have role and content", field="messages")
        encoded = chat.messages.add(
            role=message["role"],
            content=message.get("content") or "",
            tool_call_id=message.get("tool_call_id") or "",
            name=message.get("name") or "",
        )
        for number, call in enumerate(calls):
            function = _function(f"messages[{index}].tool_calls[{number}]", "messages", call)
            encoded.tool_calls.add(
                id=call.get("id", ""), name=function["name"], arguments=_json(function.get("arguments", {}))
            )
    for index, tool in enumerate(tools):
        function = _function(f"tools[{index}]", "tools", tool)
        chat.tools.add(
            name=function["name"],
            description=function.get("description") or "",
            parameters=_json(function.get("parameters") or {}),
        )


def _function(path: str, field: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    function = value.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path} must have a function with a name", field=field)
    return function


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
