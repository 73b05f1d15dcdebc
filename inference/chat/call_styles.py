"""The formats in which model families write tool calls, each a coroutine over a ToolCallParser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from inference.chat.tool_calls import CallPart, End

if TYPE_CHECKING:
    from inference.chat.tool_calls import Machine, ToolCallParser, Wait

Style = Literal["hermes", "llama3", "mistral"]
"""`<tool_call>{"name", "arguments"}</tool_call>` (Hermes, Qwen); `{"name", "parameters"}`, optionally after
`<|python_tag|>` (Llama 3); `[TOOL_CALLS][{"name", "arguments"}]` or `[TOOL_CALLS]name[ARGS]{...}` (Mistral).
"""
TAGS: dict[Style, str] = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}


def style_of(template: str) -> Style:
    """The style that a chat template uses; Hermes by default."""
    for style, tag in TAGS.items():
        if tag in template:
            return style
    return "llama3" if "ipython" in template and "parameters" in template else "hermes"


def _hermes(parser: ToolCallParser) -> Wait:
    begin, end = TAGS["hermes"], "</tool_call>"
    while True:
        tag = yield from parser.text_until(begin)
        while (yield from parser.call(tag, strict=False)):
            tag = yield from parser.skip_until(end, begin)
            if tag == end:
                break


def _llama3(parser: ToolCallParser) -> Wait:
    tag = TAGS["llama3"]
    while True:
        before = yield from parser.text_until(tag, "{")
        if before.endswith("{"):
            parser.push("{")
            before = before[:-1]
        if (yield from parser.call(before, strict=True)):
            yield from parser.separator("{<")
        else:
            yield from parser.rest_of_object()


def _mistral(parser: ToolCallParser) -> Wait:
    tag = TAGS["mistral"]
    while True:
        before = yield from parser.text_until(tag)
        character = yield from parser.visible()
        if character == "[":
            yield from parser.calls_in_list(before + "[")
            continue
        if character == "{":
            parser.push(character)
            yield from parser.call(before, strict=False)
            continue
        read = ""
        try:
            while character != "{" and not character.isspace():
                read += character
                character = yield from parser.next()
        except End:
            parser.emit(before + read)
            raise
        name = read.partition("[")[0]
        if character != "{" or not name or not parser.knows(name):
            parser.emit(before + read + character)
            continue
        parser.push(character)
        yield from parser.named_call(before + read, name)


MACHINES: dict[Style, Machine] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}


def listed(parser: ToolCallParser) -> Wait:
    """Parse a grammar-enforced list of calls."""
    parser.only_calls = True
    yield from parser.text_until("[")
    yield from parser.calls_in_list("[")
    while True:
        yield from parser.next()


def only_arguments(name: str) -> Machine:
    """Parse the grammar-enforced arguments of a call to `name`."""

    def machine(parser: ToolCallParser) -> Wait:
        first = yield from parser.next()
        parser.calls = 1
        parser.emit(CallPart(0, name, first))
        while True:
            parser.emit(CallPart(0, None, (yield from parser.next())))

    return machine
