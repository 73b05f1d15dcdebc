"""The tools of /v1/responses: functions, functions in namespaces, and custom tools, which take a text.

The model sees functions only. One in a namespace is called `NAMESPACE__NAME`, and a custom tool is a function with one text,
`input`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.errors import InvalidRequest, NotServed

if TYPE_CHECKING:
    from collections.abc import Iterator

Tools = list[dict[str, Any]]
Choice = str | dict[str, Any] | None
SEPARATOR = "__"
INPUT = "input"
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
TEXT_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class ToolNames:
    """What the names of the model's calls mean to the client."""

    def __init__(self, tools: Tools | None) -> None:
        """`tools` were checked by `functions_of`."""
        self.custom = frozenset(tool["name"] for tool in tools or [] if tool["type"] == "custom")
        self._spaced = {
            flat_name(tool["name"], inner["name"]): (tool["name"], inner["name"])
            for tool in tools or []
            if tool["type"] == "namespace"
            for inner in tool["tools"]
        }

    def named(self, name: str) -> dict[str, str]:
        """The keys of a call that name its function."""
        if name not in self._spaced:
            return {"name": name}
        namespace, inner = self._spaced[name]
        return {"name": inner, "namespace": namespace}


def flat_name(namespace: str | None, name: str) -> str:
    """The name that the model sees."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def functions_of(tools: Tools | None) -> Tools | None:
    """The tools in the form of a chat request; raises InvalidRequest or NotServed."""
    found = [function for index, tool in enumerate(tools or []) for function in _functions(f"tools[{index}]", tool)]
    return found or None


def choice_of(choice: Choice, tools: Tools | None) -> Choice:
    """`tool_choice` in the form of a chat request; a name in one namespace alone needs no prefix."""
    if not tools and choice in (None, "auto", "none"):
        return None
    if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        return choice
    if choice.get("type") not in ("function", "custom"):
        raise NotServed(
            f"tool_choice: the type {str(choice.get('type'))[:40]!r} is not supported by this server.", "tool_choice"
        )
    name = choice["name"]
    spaced = [
        flat_name(tool["name"], name)
        for tool in tools or []
        if tool["type"] == "namespace" and any(inner["name"] == name for inner in tool["tools"])
    ]
    if spaced and all(tool.get("name") != name for tool in tools or []):
        if len(spaced) > 1:
            text = f"tool_choice: {name[:100]!r} is in several namespaces; name it {' or '.join(spaced)}."
            raise InvalidRequest(text[:1000], "tool_choice")
        name = spaced[0]
    return {"type": "function", "function": {"name": name}}


def text_arguments(text: str) -> str:
    """The arguments of a call to a custom tool with this text."""
    return msgspec.json.encode({INPUT: text}).decode()


def is_object(arguments: Any) -> bool:
    """Whether the arguments of a call to a function are an object, or the text of one."""
    try:
        return isinstance(msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments, dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def text_of(arguments: str) -> str:
    """The text in the arguments of a call to a custom tool; arguments that were cut are returned as they are."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _functions(field: str, tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = tool.get("type")
    if kind == "function":
        yield _function(tool)
    elif kind == "custom":
        form = tool.get("format")
        if isinstance(form, dict) and form.get("type", "text") != "text":
            raise NotServed(f"{field}.format: only the type 'text' is supported by this server.", "tools")
        yield _function({**_named(field, tool), "parameters": TEXT_PARAMETERS})
    elif kind == "namespace":
        _named(field, tool)
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(function, dict) for function in inner):
            raise InvalidRequest(f"{field}.tools must be a list of functions.", "tools")
        for index, function in enumerate(inner):
            if function.get("type") != "function":
                raise NotServed(f"{field}.tools[{index}]: only tools of type 'function' are supported.", "tools")
            yield _function(
                {**_named(f"{field}.tools[{index}]", function), "name": flat_name(tool["name"], function["name"])}
            )
    else:
        raise NotServed(f"{field}: tools of type {str(kind)[:40]!r} are not supported by this server.", "tools")


def _named(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{field}.name must be a non-empty string.", "tools")
    return tool


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A function is flat here, nested in a chat request."""
    return {"type": "function", "function": {key: tool[key] for key in FUNCTION_KEYS if tool.get(key) is not None}}
