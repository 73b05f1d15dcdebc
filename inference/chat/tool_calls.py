"""Incremental parser of tool calls; `call_styles` has the formats of several model families.

The result does not depend on how the text is split. Each style is a coroutine that receives one character at a time.

A call names a known function, and has arguments. Until both are certain its text is held back, and returned as text if
it turns out to be something else. A stream shows a call's arguments as they come; a whole answer shows a call only if
all of it is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

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


class End(Exception):
    """Raised at the end of the output."""


class Nesting:
    """The depth of brackets in a text that is JSON but for control characters in strings; brackets in strings do not count."""

    def __init__(self, text: str = "") -> None:
        self.depth = 0
        self._in_string = self._escaped = False
        for character in text:
            self.add(character)

    def add(self, character: str) -> str:
        """Count the next character; returns it as JSON has it, for models write control characters into strings."""
        written = character
        if self._in_string and character < " ":
            # A backslash before one can only stand for itself.
            written = "\\" * self._escaped + json.dumps(character)[1:-1]
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = character == "\\", character != '"'
        else:
            self._in_string = character == '"'
            self.depth += (character in "{[") - (character in "}]")
        return written


class ToolCallParser:
    """Parses one output. `calls` is the number of calls so far."""

    def __init__(self, machine: Machine, names: Collection[str] | None = None, whole: bool = False) -> None:
        """`names` are the known functions; None: any. `whole`: the answer is not streamed."""
        self.calls = 0
        self.only_calls = False
        """Whether a grammar allows nothing but calls: text is the beginning of one that was cut, and not shown."""
        self.not_a_call = ""
        """The text of the last object that was not a call."""
        self._names, self._whole = names, whole
        self._held: list[CallPart] | None = None
        """Pieces of a call that may still turn out to be text."""
        self._certain = False
        """Whether the current call has a known name and arguments."""
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
        with suppress(End, StopIteration):
            self._machine.throw(End())
        return self._taken()

    def emit(self, part: Part) -> None:
        """Add a part, merged with the previous one of its kind."""
        last = self._parts[-1] if self._parts else None
        if self._held is not None and isinstance(part, CallPart):
            self._held.append(part)
        elif isinstance(part, str):
            if self.only_calls:
                return
            if isinstance(last, list):
                last.append(part)
            elif part:
                self._parts.append([part])
        elif isinstance(last, tuple) and last[0] == part.index:
            last[2].append(part.arguments)
        else:
            self._parts.append((part.index, part.name, [part.arguments]))

    def emitter(self, index: int) -> Callable[[str], None]:
        """A function that adds pieces of a call's arguments; with the first one the call is certain."""

        def emit(text: str) -> None:
            self.emit(CallPart(index, None, text))
            if not self._certain:
                self._make_certain()

        return emit

    def knows(self, name: str) -> bool:
        """Whether a function has this name."""
        return self._names is None or name in self._names

    def _make_certain(self) -> None:
        self._certain = True
        if not self._whole:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held or [], None
        for part in held:
            self.emit(part)

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

    def text_until(self, *tags: str) -> Character:
        """Emit text up to any of `tags`; the tag, with the white space before it, is returned instead."""
        space: list[str] = []
        begun = ""
        try:
            while begun not in tags:
                character = yield from self.next()
                if not begun and character.isspace():
                    space.append(character)
                    continue
                begun += character
                while not any(tag.startswith(begun) for tag in tags):
                    self.emit("".join(space) + begun[0])
                    space, begun = [], begun[1:]
                    if begun.isspace():
                        space, begun = [begun], ""
        except End:
            self.emit("".join(space) + begun)
            raise
        return "".join(space) + begun

    def skip_until(self, *tags: str) -> Character:
        """Drop text until one of `tags` is complete, and return the tag. Without one the text is emitted at the end, but for white
        space and a first tag that was cut.
        """
        seen = ""
        try:
            while True:
                seen += yield from self.next()
                for tag in tags:
                    if seen.endswith(tag):
                        return tag
        except End:
            cut = next(size for size in range(len(tags[0]), -1, -1) if seen.endswith(tags[0][:size]))
            seen = seen[: len(seen) - cut]
            if not seen.isspace():
                self.emit(seen)
            raise

    def separator(self, begin: str) -> Wait:
        """Drop white space and a separator between calls, which begin with a character of `begin`."""
        read, character = "", " "
        while character.isspace() or (character in ";," and read.isspace()):
            read += character
            character = yield from self.next()
        if character not in begin:
            self.emit(read[1:])
        self.push(character)

    def call(self, tag: str, strict: bool) -> Generator[None, str, bool]:
        """Parse a call object, keys in any order; emit it as text after `tag` if it is not a call."""
        return (yield from self._tried(tag, self._object(strict)))

    def named_call(self, tag: str, name: str) -> Generator[None, str, bool]:
        """Parse the arguments of a call whose name was read already, as part of `tag`."""
        return (yield from self._tried(tag, self._arguments_of(name)))

    def _tried(self, tag: str, content: Wait) -> Generator[None, str, bool]:
        begun = self.calls
        self._raw, self._held, self._certain = [], [], False
        try:
            yield from content
            if self._whole:
                _loads("".join(self._raw))
            self._release()
        except (_NotACall, End) as reason:
            ended = isinstance(reason, End)
            # What a client has seen cannot be taken back; a call that is cut keeps what it has.
            if self._certain and (not self._whole or (ended and self._is_begun())):
                self._release()
            else:
                self._held, self.calls = None, begun
                self.not_a_call = "".join(self._raw)
                self.emit(tag + self.not_a_call)
            if ended:
                raise
            return self.calls > begun
        finally:
            self._raw = None
        return True

    def _is_begun(self) -> bool:
        """Whether the held pieces are the beginning of a call: arguments that were closed are JSON."""
        text = "".join(part.arguments for part in self._held or [])
        try:
            return Nesting(text).depth > 0 or _loads(text) is not None
        except _NotACall:
            return False

    def rest_of_object(self) -> Wait:
        """Emit the rest of an object that was not a call, so that calls in its values are not taken for the model's."""
        nesting = Nesting(self.not_a_call)
        while self.not_a_call[1:].lstrip().startswith('"') and nesting.depth > 0:
            character = yield from self.next()
            self.emit(character)
            nesting.add(character)

    def calls_in_list(self, tag: str) -> Wait:
        """Parse calls between `[`, which was read, and `]`."""
        while (character := (yield from self.visible())) != "]":
            if character != ",":
                self.push(character)
                if not (yield from self.call(tag, strict=False)):
                    return
                tag = ""  # the bracket belongs to the first call

    def arguments(self, emit: Callable[[str], None]) -> Wait:
        """Parse a call's arguments: an object, or a string that contains one. Control characters in its strings are escaped."""
        character = yield from self.visible()
        if character == '"':
            text = (yield from self._string()) or "{}"
            if not isinstance(_loads(text), dict):
                raise _NotACall
            emit("".join(map(Nesting().add, text)))
            return
        if character == "n":
            self.push(character)
            if (yield from self._other_value()) is not None:
                raise _NotACall
            emit("{}")
            return
        if character != "{":
            raise _NotACall
        nesting = Nesting(character)
        emit(character)
        while nesting.depth:
            emit(nesting.add((yield from self.next())))

    def _arguments_of(self, name: str) -> Wait:
        index, self.calls = self.calls, self.calls + 1
        self.emit(CallPart(index, name))
        yield from self.arguments(self.emitter(index))

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
                    if not isinstance(value, str) or not value or name or not self.knows(value):
                        raise _NotACall
                    name, self.calls = value, index + 1
                    self.emit(CallPart(index, name))
                    if emitted:
                        self.emitter(index)(early)
        if not name or (strict and not emitted):
            raise _NotACall
        if not emitted:
            self.emitter(index)("{}")

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


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _loads(text: str) -> object:
    try:
        value = json.loads(text, strict=False, parse_constant=_no_json)
        if isinstance(value, str):
            value.encode()  # half of an escaped surrogate pair is not a character
    except (ValueError, RecursionError) as error:
        raise _NotACall from error
    return value
