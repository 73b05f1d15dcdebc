"""The body of /v1/responses, and its translation to a chat request."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from inference.dialects.openai.schema import ChatCompletionRequest
from inference.errors import InvalidRequest, NotServed, TemplateError

NOT_SERVED = ("previous_response_id", "background", "prompt", "conversation")
INPUT_FORMS = [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
CHAT_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What a field of a chat request is called here."""
TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(msgspec.Struct):
    """POST /v1/responses. `store`, `metadata`, `user`, `service_tier` and `include` are accepted; responses are not
    stored.
    """

    input: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": INPUT_FORMS})] = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    seed: int | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    conversation: Any = None
    request_id: str | None = None


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request for the chat route; raises InvalidRequest or NotServed."""
    for name in NOT_SERVED:
        if getattr(body, name):
            raise NotServed(f"{name} is not supported by this server.", name)
    if body.truncation not in (None, "disabled"):
        raise NotServed("truncation: only 'disabled' is supported by this server.", "truncation")
    messages = _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest("reasoning.effort must be a string.", "reasoning")
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stream=body.stream,
        logprobs=None if body.top_logprobs is None else True,
        top_logprobs=body.top_logprobs,
        tools=None if not body.tools else [_tool(i, tool) for i, tool in enumerate(body.tools)],
        tool_choice=_choice(body.tool_choice) if body.tools else None,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        reasoning_effort=effort,
    )


def name_field(error: InvalidRequest | NotServed | TemplateError) -> None:
    """Name the field of this route that a chat request's error means."""
    field = error.field or ""
    name = next((name for name in CHAT_FIELDS if re.match(rf"{name}\b", field)), None)
    if name is not None:
        error.field = CHAT_FIELDS[name]
        error.message = re.sub(rf"^{name}\b(\[\d+\])?", error.field, error.message)


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise InvalidRequest("input must be a non-empty string or list of items.", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        field, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), field)})
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _content(output, field)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
        elif kind != "reasoning":  # templates do not take earlier reasoning
            raise NotServed(f"{field}: items of type {str(kind)[:40]!r} are not supported.", field)
    return messages


def _content(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{field}.content must be a string or a list of parts.", f"{field}.content")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise NotServed(f"{field}.content: parts of type {str(kind)[:40]!r} are not supported.", f"{field}.content")
        texts.append(part["text"])
    return "\n".join(texts)


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Consecutive calls belong to one assistant message."""
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
        messages[-1]["tool_calls"].append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool is flat here, nested in a chat request."""
    if tool.get("type") != "function":
        raise NotServed(f"tools[{index}]: only tools of type 'function' are supported.", "tools")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequest("text.format must be an object.", "text")
    if given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}
    return given
