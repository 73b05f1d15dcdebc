"""The tools of /v1/responses: functions, functions in namespaces, and custom tools, which take a text.

The model sees functions only. One in a namespace is called `NAMESPACE__NAME`, and a custom tool is a function with one
text, `input`. Tools that a vendor's servers run are accepted and not offered to the model, as vLLM does: agents list
them unasked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from inference.errors import InvalidRequest, NotServed

if TYPE_CHECKING:
    from collections.abc import Iterator

Tools = list[dict[str, Any]]
Choice = str | dict[str, Any] | None
SEPARATOR = "__"
INPUT = "input"
NOT_OFFERED = re.compile(
    r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|file_search|code_interpreter|image_generation|mcp"
    r"|computer(_use)?(_preview)?|programmatic_tool_calling|tool_search|local_shell|shell|apply_patch"
)
"""The types of tools that OpenAI's servers run, and those whose calls are items of their own that models here do not
write.
"""
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
        spaced = [
            (tool["name"], inner) for tool in tools or [] if tool["type"] == "namespace" for inner in tool["tools"]
        ]
        self.custom = frozenset(tool["name"] for tool in tools or [] if tool["type"] == "custom") | {
            flat_name(namespace, inner["name"]) for namespace, inner in spaced if inner["type"] == "custom"
        }
        """The names that the model sees of tools that take a text."""
        self._spaced = {flat_name(namespace, inner["name"]): (namespace, inner["name"]) for namespace, inner in spaced}

    def named(self, name: str) -> dict[str, str]:
        """The keys of a call that name its function."""
        if name not in self._spaced:
            return {"name": name}
        namespace, inner = self._spaced[name]
        return {"name": inner, "namespace": namespace}


def is_hosted(tool: dict[str, Any]) -> bool:
    """Whether this is, or names, a tool that is not offered to the model."""
    return NOT_OFFERED.fullmatch(str(tool.get("type"))) is not None


def flat_name(namespace: str | None, name: str) -> str:
    """The name that the model sees."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def functions_of(tools: Tools | None) -> Tools | None:
    """The tools in the form of a chat request; raises InvalidRequest or NotServed."""
    found = [function for index, tool in enumerate(tools or []) for function in _functions(f"tools[{index}]", tool)]
    return found or None


def choice_of(choice: Choice, tools: Tools | None) -> Choice:
    """`tool_choice` in the form of a chat request; a name in one namespace alone needs no prefix."""
    offered = [tool for tool in tools or [] if not is_hosted(tool)]
    if not offered:
        if choice in (None, "auto", "none"):
            return None
        if choice == "required" and tools:
            raise InvalidRequest(
                "tool_choice: none of the tools runs here, so that no call can be required.", "tool_choice"
            )
    if isinstance(choice, dict) and is_hosted(choice):
        raise NotServed(f"tool_choice: no tool of type {choice['type']!r} runs here.", "tool_choice")
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
        told = {**_named(field, tool), "description": _described(field, tool)}
        yield _function({**told, "parameters": TEXT_PARAMETERS})
    elif kind == "namespace":
        _named(field, tool)
        inner = tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(function, dict) for function in inner):
            raise InvalidRequest(f"{field}.tools must be a list of functions.", "tools")
        for index, function in enumerate(inner):
            place = f"{field}.tools[{index}]"
            if function.get("type") not in ("function", "custom"):
                raise NotServed(f"{place}: only tools of the types 'function' and 'custom' are supported.", "tools")
            named = {**_named(place, function), "name": flat_name(tool["name"], function["name"])}
            yield from _functions(place, named)
    elif not is_hosted(tool):
        raise NotServed(f"{field}: tools of type {str(kind)[:40]!r} are not supported by this server.", "tools")


def _described(field: str, tool: dict[str, Any]) -> str | None:
    """The description of a custom tool. A grammar of its text is told to the model and not enforced, for the text is
    sent as a JSON string, in which it is written otherwise.
    """
    description, form = tool.get("description"), tool.get("format")
    if not isinstance(form, dict) or form.get("type", "text") == "text":
        return description
    syntax, definition = form.get("syntax"), form.get("definition")
    if form.get("type") != "grammar" or not isinstance(definition, str) or syntax not in ("lark", "regex"):
        raise InvalidRequest(
            f"{field}.format must have the type 'text', or 'grammar' with a definition and the syntax "
            "'lark' or 'regex'.",
            "tools",
        )
    return f"{description or ''}\n\nThe input must follow this grammar ({syntax}):\n{definition}".lstrip()


def _named(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{field}.name must be a non-empty string.", "tools")
    return tool


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A function is flat here, nested in a chat request."""
    return {"type": "function", "function": {key: tool[key] for key in FUNCTION_KEYS if tool.get(key) is not None}}
