"""Prepares a conversation's messages for the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from inference.errors import InvalidRequest, NotServed

RESERVED_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "self"}
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""The types of parts that are text, and the key under which each has it."""


def parse_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Check the messages; each returned one has a text as its content, empty if it had none, and calls only if there are any.

    All other fields are passed to the template unchanged. Raises InvalidRequest or NotServed.
    """
    if not messages:
        raise InvalidRequest("messages must be a non-empty list.", "messages")
    return [_message(i, message) for i, message in enumerate(messages)]


def ends_with_assistant(messages: list[dict[str, Any]]) -> bool:
    """Whether the final message is a text of the assistant, which TGI's router continues."""
    final = messages[-1]
    return final["role"] == "assistant" and bool(final.get("content")) and not final.get("tool_calls")


def template_arguments(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs` without the names that have a meaning of their own, here or in templates (`self`)."""
    return {key: value for key, value in (given or {}).items() if key not in RESERVED_NAMES}


def joined_parts(parts: list[Any], field: str) -> str:
    """The texts of a content's parts, one a line. Raises NotServed for parts that are not text, InvalidRequest for one without its text."""
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        key = TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        text = part if isinstance(part, str) else part.get(key) if key is not None else None
        if key is not None and not isinstance(text, str):
            raise InvalidRequest(f"{field}[{i}].{key} must be a string.", f"{field}[{i}].{key}")
        if not isinstance(text, str):
            raise NotServed(f"{field}: parts of type {str(kind)[:40]!r} are not supported.", field)
        texts.append(text)
    return "\n".join(texts)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest(f"{field}.role must be a non-empty string.", f"{field}.role")
    content = message.get("content")
    if isinstance(content, list):
        content = joined_parts(content, f"{field}.content")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{field}.content must be a string, a list of parts or null.", f"{field}.content")
    if isinstance(message.get("tool_calls"), list):
        calls = [_call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message["tool_calls"])]
        message = {**message, "tool_calls": calls or None}  # templates take an empty list for a call
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if message["role"] == "assistant" and isinstance(reasoning, str):  # templates know it by either name
        message = {**message, "reasoning": reasoning, "reasoning_content": reasoning}
    # Optional fields sent as null are treated as absent: some clients send every field. The content is always a text:
    # many templates add it to others, or print it.
    return {**{k: v for k, v in message.items() if v is not None}, "content": content or ""}


def _call(field: str, call: Any) -> dict[str, Any]:
    """An earlier tool call with its arguments as an object, which templates expect, instead of JSON text. A model may have written
    what is none, or have been cut off; as in vLLM the call then has no arguments.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{field}.function must be an object with a name.", field)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
