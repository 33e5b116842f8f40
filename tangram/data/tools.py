"""Tools in conversations: their descriptions and the model's calls, as JSON in the records and as text in the templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tangram.data.conversation import Conversation
from tangram.errors import DataError

THOUGHT_START, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class Call:
    """One call of a function."""

    name: str
    arguments: str
    """JSON, as the model writes it."""


@dataclass(frozen=True)
class ToolTexts:
    """How a template writes tools.

    Args:
        prompt: follows the system prompt; ``{tools}`` stands for the descriptions, one a line.
        call: one call; ``{name}`` and ``{arguments}`` stand for its parts. Several calls are on lines of their own.
    """

    prompt: str
    call: str

    def describe(self, tools: list[dict[str, Any]]) -> str:
        return self.prompt.replace("{tools}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))

    def write(self, calls: list[Call]) -> str:
        return "\n".join(self.call.replace("{name}", call.name).replace("{arguments}", call.arguments) for call in calls)


def read_tools(conversation: Conversation) -> list[dict[str, Any]]:
    """The tools of a conversation, each wrapped as ``{"type": "function", "function": {...}}`` where the record does not do so.

    Raises:
        DataError: not a JSON list of objects.
    """
    if conversation.tools is None or not conversation.tools.strip():
        return []
    try:
        tools = json.loads(conversation.tools)
    except json.JSONDecodeError as error:
        raise DataError(f"{conversation.where}: tools: not JSON ({error}); write a list of tool descriptions") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError(f"{conversation.where}: tools: must be a list of tool descriptions, each an object, got {conversation.tools[:60]}")
    return [tool if tool.get("type") == "function" and "function" in tool else {"type": "function", "function": tool} for tool in tools]


def read_calls(content: str, where: str) -> tuple[str, list[Call]]:
    """The thought that a function call begins with (an empty string if there is none) and its calls.

    Args:
        content: ``{"name": ..., "arguments": ...}`` or a list of such objects, after an optional thought. Arguments that are a text are JSON already.
        where: the sample, for messages.

    Raises:
        DataError: no such JSON.
    """
    thought, end, rest = content.rpartition(THOUGHT_END)
    try:
        read = json.loads(rest)
    except json.JSONDecodeError as error:
        raise DataError(
            f'{where}: a function call that is not JSON ({error}); write {{"name": ..., "arguments": {{...}}}} or a list of such'
        ) from None
    calls = [_call(call, where) for call in (read if isinstance(read, list) else [read])]
    if not calls:
        raise DataError(f"{where}: a function call without calls; write at least one, or remove the message")
    return thought + end + rest[: len(rest) - len(rest.lstrip())] if end else "", calls


def _call(call: Any, where: str) -> Call:
    name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
        raise DataError(f"{where}: a function call needs the text 'name' and the object 'arguments', got {json.dumps(call, ensure_ascii=False)[:60]}")
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
