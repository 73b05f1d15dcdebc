"""The process that renders one chat template for `inference.chat.guarded_template`; the kernel ends it when it exceeds its CPU time.

Frames in both directions: a little-endian unsigned 32-bit length and that many bytes of msgpack. stdin: the template's text, then for
each rendering the values by name. stdout: for each rendering `[text, error]`, of which one is empty. It ends with stdin.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import IO, Any

import jinja2
import msgspec

from inference.chat.template_environment import environment

CPU_S = 2.0
"""CPU seconds of one rendering; compiling the template is part of the first."""
MEMORY_BYTES = 1 << 29
MAX_TEXT = 4_000_000
"""Characters of a rendered text."""
LENGTH = struct.Struct("<I")
WRONG = (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError, jinja2.TemplateError)
"""What a template raises by its own fault."""


def read_frame(file: IO[bytes]) -> bytes:
    """The next frame; raises EOFError at the end."""
    head = file.read(LENGTH.size)
    body = file.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    if len(head) < LENGTH.size or len(body) < LENGTH.unpack(head)[0]:
        raise EOFError
    return body


def write_frame(file: IO[bytes], value: Any) -> None:
    """Write and flush a frame."""
    body = msgspec.msgpack.encode(value)
    file.write(LENGTH.pack(len(body)) + body)
    file.flush()


def main() -> None:
    """Set limits, then render until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    source, given, answers = msgspec.msgpack.decode(read_frame(sys.stdin.buffer)), sys.stdin.buffer, sys.stdout.buffer
    template: jinja2.Template | None = None
    while True:
        values = msgspec.msgpack.decode(read_frame(given))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF, which is not handled, ends the process
        try:
            template = template or environment().from_string(source)
            text, error = template.render(values), ""
            if len(text) > MAX_TEXT:
                text, error = "", f"it produced more than {MAX_TEXT} characters"
        except WRONG as problem:
            text, error = "", str(problem)[:300] or type(problem).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            write_frame(answers, (text, error))
        except UnicodeEncodeError:
            write_frame(answers, ("", "it produced a lone surrogate, which is not valid Unicode"))


if __name__ == "__main__":
    try:
        main()
    except (EOFError, KeyboardInterrupt):
        sys.exit(0)
