"""Incremental parser of tool calls in the formats of several model families.

The result does not depend on how the text is split. Text that only looks like a call is returned as text. Each style
is a coroutine that receives one character at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

Style = Literal["hermes", "llama3", "mistral"]
"""`<tool_call>{"name", "arguments"}</tool_call>` (Hermes, Qwen); `{"name", "parameters"}`, optionally after
`<|python_tag|>` (Llama 3); `[TOOL_CALLS][{"name", "arguments"}]` or `[TOOL_CALLS]name[ARGS]{...}` (Mistral).
"""
TAGS: dict[Style, str] = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
ARGUMENTS = ("arguments", "parameters")
KEYS = (*ARGUMENTS, "name", "type", "id")
"""The keys of a call's object; a bare object with any other key is a JSON answer, not a call."""


@dataclass(slots=True)
class CallPart:
    """A piece of call number `index`: the first piece has the name, all have part of the arguments' JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


Part = str | CallPart
"""Text outside the calls, or a piece of a call."""

Wait = Generator[None, str, None]
Character = Generator[None, str, str]
Machine = Callable[["ToolCallParser"], Wait]


class _NotACall(Exception):
    """Raised when the text read so far is not a call."""


class _End(Exception):
    """Raised at the end of the output."""


def style_of(template: str) -> Style:
    """The style that a chat template uses; Hermes by default."""
    for style, tag in TAGS.items():
        if tag in template:
            return style
    return "llama3" if "ipython" in template and "parameters" in template else "hermes"


class ToolCallParser:
    """Parses one output. `calls` is the number of calls so far."""

    def __init__(self, machine: Machine) -> None:
        self.calls = 0
        self._parts: list[list[str] | tuple[int, str | None, list[str]]] = []
        self._pushed = ""
        self._raw: list[str] | None = None
        """The text of the current call, returned as text if it turns out not to be one."""
        self._machine = machine(self)
        next(self._machine)

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        for character in text:
            self._machine.send(character)
        return self._taken()

    def end(self) -> list[Part]:
        """Flush the held-back text at the end."""
        with suppress(_End, StopIteration):
            self._machine.throw(_End())
        return self._taken()

    def emit(self, part: Part) -> None:
        """Add a part, merged with the previous one of its kind."""
        last = self._parts[-1] if self._parts else None
        if isinstance(part, str):
            if isinstance(last, list):
                last.append(part)
            elif part:
                self._parts.append([part])
        elif isinstance(last, tuple) and last[0] == part.index:
            last[2].append(part.arguments)
        else:
            self._parts.append((part.index, part.name, [part.arguments]))

    def emitter(self, index: int) -> Callable[[str], None]:
        """A function that adds pieces of a call's arguments."""
        return lambda text: self.emit(CallPart(index, None, text))

    def _taken(self) -> list[Part]:
        noted, self._parts = self._parts, []
        return [
            "".join(part) if isinstance(part, list) else CallPart(part[0], part[1], "".join(part[2])) for part in noted
        ]

    # Building blocks of the styles.

    def next(self) -> Character:
        """The next character."""
        if self._pushed:
            character, self._pushed = self._pushed, ""
        else:
            character = yield
        if self._raw is not None:
            self._raw.append(character)
        return character

    def push(self, character: str) -> None:
        """Push a character back, to be read again."""
        self._pushed = character
        if self._raw:
            self._raw.pop()

    def visible(self) -> Character:
        """The next character that is not white space."""
        while (character := (yield from self.next())).isspace():
            pass
        return character

    def text_until(self, tag: str) -> Character:
        """Emit text up to `tag`; the tag, with the white space before it, is returned instead."""
        space: list[str] = []
        begun = ""
        try:
            while begun != tag:
                character = yield from self.next()
                if not begun and character.isspace():
                    space.append(character)
                    continue
                begun += character
                while not tag.startswith(begun):
                    self.emit("".join(space) + begun[0])
                    space, begun = [], begun[1:]
                    if begun.isspace():
                        space, begun = [begun], ""
        except _End:
            self.emit("".join(space) + begun)
            raise
        return "".join(space) + tag

    def skip_until(self, tag: str) -> Wait:
        """Drop text until `tag` is complete."""
        seen = ""
        while not seen.endswith(tag):
            seen = (seen + (yield from self.next()))[-len(tag) :]

    def call(self, tag: str, strict: bool) -> Generator[None, str, bool]:
        """Parse a call object, keys in any order; emit it as text after `tag` if it is not a call."""
        self._raw, begun = [], self.calls
        try:
            yield from self._object(strict)
        except (_NotACall, _End) as reason:
            if self.calls == begun:
                self.emit(tag + "".join(self._raw))
            if isinstance(reason, _End):
                raise
            return self.calls > begun  # an error in a call that has begun is not shown to the client
        finally:
            self._raw = None
        return True

    def calls_in_list(self, tag: str) -> Wait:
        """Parse calls between `[`, which was read, and `]`."""
        while (character := (yield from self.visible())) != "]":
            if character != ",":
                self.push(character)
                if not (yield from self.call(tag, strict=False)):
                    return

    def arguments(self, emit: Callable[[str], None]) -> Wait:
        """Parse a call's arguments: an object, or a string that contains one."""
        character = yield from self.visible()
        if character == '"':
            emit((yield from self._string()) or "{}")
            return
        if character == "n":
            self.push(character)
            if (yield from self._other_value()) is not None:
                raise _NotACall
            emit("{}")
            return
        if character != "{":
            raise _NotACall
        depth, in_string, escaped = 1, False, False
        emit(character)
        while depth:
            character = yield from self.next()
            emit(character)
            if escaped:
                escaped = False
            elif in_string:
                escaped, in_string = character == "\\", character != '"'
            else:
                in_string = character == '"'
                depth += (character in "{[") - (character in "}]")

    def _object(self, strict: bool) -> Wait:
        index, name, early, emitted = self.calls, "", "", False
        if (yield from self.visible()) != "{":
            raise _NotACall
        while (character := (yield from self.visible())) != "}":
            if character == ",":
                continue
            if character != '"':
                raise _NotACall
            key = yield from self._string()
            if (yield from self.visible()) != ":" or (strict and key not in KEYS):
                raise _NotACall
            if key in ARGUMENTS:
                pieces: list[str] = []  # of a second value, which is dropped
                yield from self.arguments(self.emitter(index) if name and not emitted else pieces.append)
                early, emitted = early or "".join(pieces), True
            else:
                value = yield from self._other_value()
                if key == "name":
                    if not isinstance(value, str) or not value or name:
                        raise _NotACall
                    name, self.calls = value, index + 1
                    self.emit(CallPart(index, name, early))
        if not name:
            raise _NotACall
        if not emitted:
            self.emit(CallPart(index, None, "{}"))

    def _string(self) -> Character:
        """The rest of a string after its opening quote."""
        raw, escaped = '"', False
        while True:
            character = yield from self.next()
            raw += character
            if character == '"' and not escaped:
                return str(_loads(raw))
            escaped = character == "\\" and not escaped

    def _other_value(self) -> Generator[None, str, object]:
        character = yield from self.visible()
        if character == '"':
            return (yield from self._string())
        if character in "{[":
            raise _NotACall
        raw = ""
        while character not in ",}" and not character.isspace():
            raw += character
            character = yield from self.next()
        self.push(character)
        return _loads(raw)


def _loads(text: str) -> object:
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            value.encode()  # half of an escaped surrogate pair is not a character
    except ValueError as error:
        raise _NotACall from error
    return value


def _hermes(parser: ToolCallParser) -> Wait:
    while True:
        tag = yield from parser.text_until("<tool_call>")
        if (yield from parser.call(tag, strict=False)):
            yield from parser.skip_until("</tool_call>")


def _llama3(parser: ToolCallParser) -> Wait:
    tag, held = TAGS["llama3"], ""
    try:
        while not held.lstrip().startswith("{") and held.lstrip() != tag and tag.startswith(held.lstrip()):
            held += yield from parser.next()
    except _End:
        parser.emit(held)
        raise
    bare = held.lstrip() != tag
    while True:
        if bare and held.lstrip().startswith("{"):
            parser.push("{")
        elif bare:
            parser.emit(held)
            held = yield from parser.text_until(tag)
            bare = False
        if (yield from parser.call("" if bare else held, strict=True)):
            held = yield from parser.visible()
            if held in ";,":
                held = yield from parser.visible()
        else:
            held = ""
        bare = True


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
        except _End:
            parser.emit(before + read)
            raise
        name = read.partition("[")[0]
        if character != "{" or not name:
            parser.emit(before + read + character)
            continue
        index, parser.calls = parser.calls, parser.calls + 1
        parser.emit(CallPart(index, name))
        parser.push(character)
        yield from parser.arguments(parser.emitter(index))


MACHINES: dict[Style, Machine] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}


def listed(parser: ToolCallParser) -> Wait:
    """Parse a grammar-enforced list of calls."""
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
