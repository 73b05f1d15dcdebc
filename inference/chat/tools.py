"""`tools` and `tool_choice`: their checks, and the grammar that makes the model call a tool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import InvalidRequest
from inference.generation import structured

if TYPE_CHECKING:
    from inference.generation.requests import GrammarRequest

Tools = list[dict[str, Any]] | None
Choice = str | dict[str, Any] | None

MAX_TOOLS = 128
MAX_NAME = 256
MODES = ("none", "auto", "required")


def check_tools(tools: Tools, choice: Choice) -> None:
    """Raise InvalidRequest for invalid tool definitions or an invalid choice."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs `tools`.", "tool_choice")
        return
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest(f"tools must have 1 to {MAX_TOOLS} entries, got {len(tools)}.", "tools")
    names = [_name(i, tool) for i, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two functions have one name.", "tools")
    if choice is None or choice in MODES:
        return
    named = named_tool(choice)
    if named is None or (isinstance(choice, str) and named not in names):
        raise InvalidRequest(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}.",
            "tool_choice",
        )
    if named not in names:
        raise InvalidRequest(f"tool_choice: no function in tools is named {named[:100]!r}.", "tool_choice")


def _name(index: int, tool: dict[str, Any]) -> str:
    field = f"tools[{index}]"
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{field} must have the type 'function' and a `function` object.", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequest(f"{field}.function.name must be a string of 1 to {MAX_NAME} characters.", "tools")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"{field}.function.parameters must be a JSON schema, which is an object.", "tools")
    if not isinstance(function.get("description") or "", str):
        raise InvalidRequest(f"{field}.function.description must be a string.", "tools")
    return name


def named_tool(choice: Choice) -> str | None:
    """The function that `tool_choice` names, if any; TGI's clients send the bare name."""
    if isinstance(choice, str):
        return None if choice in MODES else choice
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def tool_names(tools: Tools) -> frozenset[str]:
    """The names of the functions."""
    return frozenset(tool["function"]["name"] for tool in tools or [])


def may_call(tools: Tools, choice: Choice) -> bool:
    """Whether the answer may contain tool calls."""
    return bool(tools) and choice != "none"


def tool_grammar(tools: Tools, choice: Choice, parallel: bool = True) -> GrammarRequest | None:
    """The grammar of a forced call: the arguments of a named tool, or a list of calls for "required"; None if calls
    are optional.
    """
    functions = [tool["function"] for tool in tools or []]
    name = named_tool(choice)
    if name is not None:
        chosen = next(function for function in functions if function["name"] == name)
        return structured.json_schema(parameters(chosen), "tools")
    if choice != "required":
        return None
    return structured.json_schema(list_of_calls(functions, parallel), "tools")


def list_of_calls(functions: list[dict[str, Any]], parallel: bool = True) -> dict[str, Any]:
    """The schema of a list of calls of these functions; of one without `parallel`."""
    call = any_call(functions, "arguments")
    listed = {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
    return listed if parallel else {**listed, "maxItems": 1}


def any_call(functions: list[dict[str, Any]], arguments: str) -> dict[str, Any]:
    """The schema of a call of any of these functions, {"name", `arguments`}."""
    definitions: dict[str, Any] = {}
    options = []
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        definitions[str(number)] = _moved(parameters(function), place)
        call = {"name": {"const": function["name"]}, arguments: {"$ref": place}}
        options.append(
            {"type": "object", "properties": call, "required": list(call), "additionalProperties": False}
        )  # fmt: skip
    return {"anyOf": options, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """The schema for another place than the root, from which its references are resolved."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    own = {"$ref": place + reference[1:]} if isinstance(reference, str) and reference.startswith("#") else {}
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in structured.VALUES:
            moved[key] = value
        elif key in structured.MAPPINGS:  # its keys are names
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = _moved(value, place)
    return moved | own


def parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: an empty object without parameters; no additional properties unless the
    schema allows them.
    """
    given = function.get("parameters") or {"type": "object", "properties": {}}
    schema: dict[str, Any] = structured.closed(given, "tools", bare_too=False)
    return schema
