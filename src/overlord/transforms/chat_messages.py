"""Conversations in the forms of OpenAI and ShareGPT, as values that a chat template receives."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles of ShareGPT (key "from") -> roles.
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
# Names of a message's reasoning. Templates read the first; gpt-oss reads the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
AS_JSON = "write it as JSON text, where absent fields are not null"


class BadConversation(Exception):
    """Raised for a row that is not a conversation, with the reason."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with the keys of OpenAI, their tools, and the weights of the assistant's messages.

    A weight is 1 unless the message has the key ``weight``.
    """

    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    weights: dict[int, float]  # by the number of the message

    def forms(self) -> Iterator[Conversation]:
        """Yield the conversation as given, then with contents as texts, then as lists of parts.

        Some templates accept only one of these. A list with other parts than text stays a list.
        """
        yield self
        for form in (_as_text, _as_parts):
            messages = tuple({**m, "content": form(m["content"])} for m in self.messages)
            if messages != self.messages:
                yield Conversation(messages, self.tools, self.weights)

    def lost(self, found: Container[int]) -> int | None:
        """Return the first message with text that is not in ``found``; None: all are."""
        for number, message in enumerate(self.messages):
            content = _as_text(message["content"])
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            has_text = any((part.get("text") or "").strip() for part in parts)
            if (has_text or message.get("tool_calls")) and number not in found:
                return number
        return None


def _as_text(content: Any) -> Any:
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def conversation(messages: Any, tools: Any = None) -> Conversation:
    """Return the conversation of a row. Raises BadConversation."""
    if not isinstance(messages, list):
        raise BadConversation(f"expected a list of messages, got {_kind(messages)}")
    if not messages:
        raise BadConversation("expected at least one message, got none")
    made, weights = [], {}
    for number, given in enumerate(messages):
        try:
            message, weight = _message(given)
        except BadConversation as fault:
            raise BadConversation(f"message {number}: {fault}") from None
        made.append(message)
        if message["role"] == "assistant":
            weights[number] = weight
    return Conversation(tuple(made), tools_of(tools), weights)


def _message(given: Any) -> tuple[dict[str, Any], float]:
    if not isinstance(given, dict):
        raise BadConversation(f"expected a mapping with role and content, got {_kind(given)}")
    message = {name: value for name, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message = _from_sharegpt(message)
    role = message.get("role")
    if role not in ROLES:
        raise BadConversation(f"expected a role of {', '.join(ROLES)}, got {role!r:.60}")
    calls = _tool_calls(message.pop("tool_calls", None))
    if calls:
        message["tool_calls"] = calls
    weight = _weight(message.pop("weight", None), role)
    message["content"] = _content(message.get("content"))
    if not (message["content"] or calls or role in ("system", "developer", "tool")):
        expected = "content or tool calls" if role == "assistant" else "content"
        raise BadConversation(f"expected {expected} of the role {role}, got none")
    if message["content"] is None and not calls:
        message["content"] = ""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message, weight


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    name, value = message.pop("from"), message.pop("value", None)
    role = SHAREGPT.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadConversation(f"expected a role of {', '.join(SHAREGPT)}, got {name!r:.60}")
    if name != "function_call":
        return {"role": role, "content": value, **message}
    calls = _json(value, "a function_call")
    return {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls], **message}


def _content(content: Any) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadConversation(f"expected content as text or a list of parts, got {_kind(content)}")
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):  # the image itself is in a column of ``Images``
        return {"type": "image"}
    raise BadConversation(f"expected parts of type text or image, got {part!r:.60}")


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadConversation(f"expected a list of tool calls, got {_kind(calls)}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are a mapping, as templates expect them."""
    call = {n: v for n, v in call.items() if v is not None} if isinstance(call, dict) else {}
    called = call.get("function", call)
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        raise BadConversation("expected the name of a function in a tool call, got none")
    called = {n: v for n, v in called.items() if v is not None}
    arguments = called.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, "the arguments of a tool call")
    elif _has_null(arguments):
        raise BadConversation(f"expected arguments without nulls, got some; {AS_JSON}")
    if not isinstance(arguments, dict):
        raise BadConversation(f"expected arguments as a mapping, got {_kind(arguments)}")
    called["arguments"] = arguments
    return {**call, "function": called} if "function" in call else called


def _weight(weight: Any, role: str) -> float:
    if weight is None:
        return 1.0
    if not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
        raise BadConversation(f"expected a weight of at least 0, got {weight!r:.60}")
    if weight and role != "assistant":
        raise BadConversation(f"expected the weight 0 for the role {role}, got {weight!r}")
    return float(weight)


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Return the definitions of tools, given as mappings or JSON text. Raises BadConversation."""
    text = isinstance(tools, str)
    if text:
        tools = _json(tools, "tools") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise BadConversation(f"expected a list of tools, got {_kind(tools)}")
    made = []
    for tool in tools:
        given = _json(tool, "a tool") if isinstance(tool, str) else tool
        if not isinstance(given, dict):
            raise BadConversation(f"expected tools as mappings, got {_kind(given)}")
        if given is tool and not text and _has_null(given):
            raise BadConversation(f"expected a tool without nulls, got some; {AS_JSON}")
        made.append(given)
    return made


def _json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as fault:
        raise BadConversation(f"expected {what} as JSON, got {text!r:.60}: {fault}") from None


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else value is None


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
