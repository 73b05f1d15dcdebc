"""`input` of /v1/responses: a text or a list of items, as the messages of a chat."""

from __future__ import annotations

from typing import Any

from inference.chat.conversation import joined_parts
from inference.dialects.openai.responses_tools import flat_name, is_object, text_arguments
from inference.errors import InvalidRequest, NotServed

INPUT_FORMS = [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
UNFINISHED = ("in_progress", "incomplete")
Messages = list[dict[str, Any]]


def messages_of(given: Any) -> Messages:
    """The messages; raises InvalidRequest or NotServed. Reasoning, text and calls of one answer are one message."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise InvalidRequest("input must be a non-empty string or list of items.", "input")
    messages: Messages = []
    for index, item in enumerate(given):
        field, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message":
            _add_message(messages, item.get("role"), _text(item.get("content"), field))
        elif kind == "reasoning":
            _add_reasoning(messages, item, field)
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(messages, item, field)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = _text(item.get("output"), field, "output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
        else:
            raise NotServed(f"{field}: items of type {str(kind)[:40]!r} are not supported.", field)
    return messages


def is_continued(given: Any, messages: Messages) -> bool:
    """Whether the answer continues the last item, which says that it is unfinished; raises NotServed if it has no text."""
    last = given[-1] if isinstance(given, list) else {}
    if last.get("status") not in UNFINISHED or last.get("type", "message") not in ("message", "reasoning"):
        return False
    if messages[-1]["role"] != "assistant" or not messages[-1].get("content"):
        raise NotServed("input: only a text of the assistant can be continued.", "input")
    return True


def _text(content: Any, field: str, name: str = "content") -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{field}.{name} must be a string or a list of parts.", f"{field}.{name}")
    return joined_parts(content, f"{field}.{name}")


def _add_message(messages: Messages, role: Any, text: str) -> None:
    begun = messages[-1] if messages else {}
    if role == begun.get("role") == "assistant" and begun["content"] is None:
        begun["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _add_reasoning(messages: Messages, item: dict[str, Any], field: str) -> None:
    if item.get("encrypted_content"):
        raise NotServed(f"{field}.encrypted_content is not supported by this server.", f"{field}.encrypted_content")
    parts = item.get("content") or item.get("summary") or []
    texts = (
        [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{field}.content must be a list of parts with a text.", f"{field}.content")
    text = "".join(map(str, texts))
    begun = messages[-1] if messages else {}
    if begun.get("role") == "assistant" and "reasoning" not in begun:
        begun["reasoning"] = text
    else:
        messages.append({"role": "assistant", "content": None, "reasoning": text})


def _add_call(messages: Messages, item: dict[str, Any], field: str) -> None:
    name, namespace = item.get("name"), item.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        raise InvalidRequest(f"{field}: name and namespace must be strings.", f"{field}.name")
    arguments = item.get("arguments") or "{}"
    if item["type"] == "custom_tool_call":
        arguments = text_arguments(str(item.get("input") or ""))
    elif not is_object(arguments):
        arguments = "{}"
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": flat_name(namespace, name), "arguments": arguments},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)
