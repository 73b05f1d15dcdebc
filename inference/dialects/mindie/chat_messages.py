"""The messages, tools and choice of a tool in a chat, checked in MindIE's order and refused in its words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from inference.chat.conversation import parse_messages
from inference.chat.tools import MODES, check_tools
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.parameters import part_text

if TYPE_CHECKING:
    from inference.dialects.mindie.fields import Fields

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_\u4e00-\u9fa5-]{1,64}")
BAD_NAME = (
    "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores and dashe within max length of 64, "
    "unexpected function name: "
)
SHOWN_CHARACTERS = 256
"""How much of a refused name is repeated."""
ROLES = ("system", "assistant", "user", "tool")
NO_ROLE = "Request param contains not role or role null"
NO_CONTENT = "Request param contains not content or content null"


def tools_of(body: Fields) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """`tools` and `tool_choice`, which is checked first, also without tools; both are None if there are no tools."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    if isinstance(choice, str):
        if choice not in MODES:
            raise invalid("Parameter tool_choice string not in [none, auto, required]")
    elif isinstance(choice, dict):
        _check_tool(choice)
    elif choice is not None:
        raise invalid("Parameter tool_choice not string or object")
    if tools is None or tools in ([], {}):
        return None, None
    if not isinstance(tools, list):
        raise invalid("Tools not array")
    for tool in tools:
        _check_tool(tool)
    check_tools(tools, choice)
    return tools, choice


def _check_tool(tool: Any) -> None:
    """A tool's definition, or the tool that `tool_choice` names."""
    if not isinstance(tool, dict) or "type" not in tool:
        raise invalid("Tool param invalid, tool type not exist")
    kind = tool["type"]
    if kind is None:
        raise invalid("Tool param invalid tool type")
    if not isinstance(kind, str):
        raise invalid("Tool param invalid tool string type")
    if kind != "function":
        raise invalid("Tool param not function type")
    if "function" not in tool:
        raise invalid("Tool param invalid, tool function not exist")
    function = tool["function"]
    if not isinstance(function, dict):
        raise invalid("Tool param invalid function object")
    if "name" not in function:
        raise invalid("Function object invalid, function name not exist")
    if not isinstance(function["name"], str):
        raise invalid("Function object invalid name type")
    _check_name(function["name"])


def _check_name(name: str) -> None:
    if not FUNCTION_NAME.fullmatch(name):
        raise invalid(BAD_NAME + name[:SHOWN_CHARACTERS])


def messages_of(body: Fields, with_tools: bool) -> list[dict[str, Any]]:
    """`messages`, with the texts of a list of parts joined without a separator. With tools the rules are stricter, and some
    have other words.
    """
    given = body.get("messages")
    if given is None and with_tools:
        raise invalid("Request param messages is null")
    if given is None:
        raise invalid("Request param contains not messages or messages null")
    if not given or not isinstance(given, list):
        raise invalid(f"Request param messages {'is ' if with_tools else ''}not arr or arr is empty")
    return parse_messages([_message(message, with_tools) for message in given])


def _message(message: Any, with_tools: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not role:
        raise invalid(NO_ROLE)
    if with_tools and role not in ROLES:
        raise invalid("Request param contains role must be system, assistant, user or tool")
    if role == "tool":
        _check_call_id(message.get("tool_call_id"))
    content = message.get("content")
    if isinstance(content, list):
        if not content:
            raise invalid("Inputs arr is empty")
        content = "".join(map(part_text, content))
    if role == "assistant":
        _check_assistant(message.get("tool_calls"), content)
    elif content is None:
        raise invalid(NO_CONTENT)
    elif not isinstance(content, str):
        raise invalid("Check open ai req parameter error" if with_tools else "The type of inputs is abnormal")
    elif with_tools and role != "tool" and not content:
        raise invalid("Request param content len should not be 0")
    return {**message, "content": content}


def _check_call_id(given: Any) -> None:
    if given is None:
        raise invalid("Request param contains not tool_call_id or tool_call_id null while role is tool")
    if not isinstance(given, str):
        raise invalid("The type of tool_call_id is abnormal")
    if not given:
        raise invalid("Request param tool_call_id len should not be 0 while role is tool")


def _check_assistant(calls: Any, content: Any) -> None:
    """Calls, of which there may be none, allow a message to have no content: MindIE's own answers have the key always."""
    if calls is not None:
        for call in calls if isinstance(calls, list) else [calls]:
            _check_call(call)
        return
    if content is None:
        raise invalid(NO_CONTENT)
    if not isinstance(content, str):
        raise invalid('Request param "content" arguments expected to be a string')
    if not content:
        raise invalid('Request param "content" should not be empty')


def _check_call(call: Any) -> None:
    """A call that the model made earlier."""
    if not isinstance(call, dict) or call.get("id") is None:
        raise invalid("Tool call param contains no id.")
    if not isinstance(call["id"], str):
        raise invalid('Tool call param "id" arguments expected to be a string')
    if call.get("type") != "function":
        raise invalid("The type of the tool. Currently, only function is supported.")
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid("Tool call param contains no function that the model called.")
    if function.get("name") is None:
        raise invalid("Tool call param contains no function name")
    if not isinstance(function["name"], str):
        raise invalid("Tool call param function name expected to be a string")
    _check_name(function["name"])
    if function.get("arguments") is None:
        raise invalid("Tool call param contains no function arguments")
    if not isinstance(function["arguments"], str):
        raise invalid("Tool call param function arguments expected to be a string")
