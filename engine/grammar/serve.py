"""The main loop of a grammar process: compile one grammar, then compute masks for every request that uses it.

Only those requests fail if it crashes or is killed. It does not communicate with the template.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from llguidance import LLMatcher

from engine.grammar import wire
from engine.grammar.source import source
from engine.messages import FrameBuffer, frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llguidance import LLTokenizer

    from engine.grammar.wire import Compile, Follow

COMPILE_CPU_S = 30
MASK_CPU_S = 5.0
"""Limit for one token and the mask after it, in seconds of CPU time."""
REQUEST_CPU_S = 30.0
"""Limit for all masks of one request together, in seconds of CPU time; it ends a request that needs half a second per
token.
"""
TOGETHER_S = 0.002
"""Seconds that the first masks of a step wait to be sent together with the others."""
MEMORY_BYTES = 1 << 30
"""Limit of the address space, in addition to the template's and the stack."""
COMPILE_STACK_BYTES = 256 << 20
"""Stack of the compiling thread: llguidance recurses as deeply as a grammar's rules are nested."""
MASKS_STACK_BYTES = 64 << 20
NICE, COMPILE_NICE, LONG_COMPILE_NICE, LONG_MASK_NICE = 5, 10, 12, 15
"""Nice values, all lower in priority than the step loop, which leaves its core to the masks while it waits for them.
`template` sets LONG_MASK_NICE for processes whose masks take long. When steps keep every core busy, a process at 12
still gets a sixteenth of a core, and one at 19 hardly anything.
"""
PATIENT_CPU_S = 5.0
"""Seconds of CPU time after which a compilation gets LONG_COMPILE_NICE."""
IN_VAIN = "it is too large, or nested too deeply"
NO_TEXT = "it allows no text"
REASONS = {
    "NoExtension": NO_TEXT,
    "NoExtensionBias": NO_TEXT,
    "ParserTooComplex": IN_VAIN,
    "LexerTooComplex": IN_VAIN,
    "InternalError": IN_VAIN,
}
"""What llguidance's reasons to stop mean to a client."""
TOO_SLOW = "it takes too long to follow"
ROWS = 16
_PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket, table: int, tokenizer: LLTokenizer) -> NoReturn:
    """Serve one grammar until the connection closes. `table`: the file descriptor of the mask table."""
    _confine()
    messages = _received(connection)
    compile_ = wire.to_process.decode(next(messages))
    masks = _Masks(table, 4 * -(-tokenizer.vocab_size // 32))
    compiled, error = _compiled(compile_, tokenizer, masks)
    connection.sendall(frame(wire.Compiled(error, masks.row_bytes)))
    if compiled is None:
        os._exit(0)
    _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    followers: dict[int, _Follower] = {}
    for body in messages:
        for answer in _follow(wire.to_process.decode(body), compiled, followers, masks):
            connection.sendall(frame(answer))
    os._exit(0)


def _confine() -> None:
    """Set the limits of this process, and let the kernel end it when the template ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # some containers forbid it
        file.write("1000")  # the kernel's first victim when memory is exhausted
    os.nice(NICE)
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, present + COMPILE_STACK_BYTES + MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, COMPILE_CPU_S)
    _limit(resource.RLIMIT_STACK, MASKS_STACK_BYTES)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a panic prints pages; clients must not be able to fill the log
        os.dup2(nothing, stream)
    gc.disable()


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
        soft = hard
    resource.setrlimit(kind, (soft, hard))


def _received(connection: socket.socket) -> Iterator[bytes]:
    """Message bodies until the connection closes, which ends the process."""
    frames = FrameBuffer()
    while data := connection.recv(1 << 16):
        yield from frames.feed(data)
    os._exit(0)


def _compiled(asked: Compile, tokenizer: LLTokenizer, masks: _Masks) -> tuple[LLMatcher | None, str | None]:
    """Compile the grammar and write its first mask into the table. Returns (matcher, None) or (None, error)."""
    done: list[tuple[LLMatcher | None, str | None]] = []

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICE)
        try:
            matcher = LLMatcher(tokenizer, source(asked.kind, asked.text), log_level=0)
            if not matcher.is_error():
                masks.fill(wire.FIRST, matcher)
            error = _error(matcher)
            done.append((None if error else matcher, error))
        except RecursionError:
            done.append((None, IN_VAIN))
        except Exception as error:  # several parsers read the client's text, and gbnf_to_lark raises plain Exceptions
            done.append((None, _first_part(f"{error}")))
        except BaseException:  # pyo3 raises it for a panic
            done.append((None, IN_VAIN))

    sys.setrecursionlimit(100_000)
    threading.stack_size(COMPILE_STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.1)
    while thread.is_alive() and time.process_time() < PATIENT_CPU_S:
        thread.join(0.5)
    if thread.is_alive() and thread.native_id is not None:
        os.setpriority(os.PRIO_PROCESS, thread.native_id, LONG_COMPILE_NICE)
        thread.join()
    return done[0]


@dataclass(slots=True)
class _Follower:
    """The grammar state of one request and the CPU time that it has used."""

    matcher: LLMatcher
    cpu_s: float = 0.0


def _follow(
    message: Follow, compiled: LLMatcher, followers: dict[int, _Follower], masks: _Masks
) -> Iterator[wire.Followed]:
    """The answers for all rows, in one message unless a slow mask would delay the others."""
    for row in message.freed:
        followers.pop(row, None)
    begin = time.perf_counter()
    answer = wire.Followed([], 0.0)
    for row, tokens in message.tokens:
        if answer.rows and time.perf_counter() - begin > TOGETHER_S:
            answer.seconds = time.perf_counter() - begin
            yield answer
            begin, answer = time.perf_counter(), wire.Followed([], 0.0)
        follower = followers.get(row)
        if follower is None:
            follower = followers[row] = _Follower(compiled.deep_copy())
        matcher, started = follower.matcher, time.thread_time()
        for token in tokens:
            signal.setitimer(signal.ITIMER_PROF, MASK_CPU_S)  # SIGPROF has no handler, so it ends the process
            if not matcher.consume_token(token):
                break
        if not matcher.is_stopped():  # as it also is in error
            masks.fill(row, matcher)
        follower.cpu_s += time.thread_time() - started
        error = _error(matcher) or (TOO_SLOW if follower.cpu_s > REQUEST_CPU_S else None)
        answer.rows.append((row, error is None and matcher.is_stopped(), error))
        signal.setitimer(signal.ITIMER_PROF, 0)
    if answer.rows:
        answer.seconds = time.perf_counter() - begin
        yield answer


def _error(matcher: LLMatcher) -> str | None:
    return _first_part(str(matcher.get_error())) if matcher.is_error() else None


def _first_part(text: str) -> str:
    """The error as shown to a client: at most 500 characters, without llguidance's state and without a panic's
    backtrace.
    """
    if "panic" in text or "<backtrace>" in text:
        return IN_VAIN
    told = text.partition("<state>")[0].strip()
    return REASONS.get(told, told[:500]) or IN_VAIN


class _Masks:
    """The mask table. This process sets its size; it never shrinks."""

    def __init__(self, file: int, row_bytes: int) -> None:
        self._file, self.row_bytes = file, row_bytes
        self._rows = 0
        self._maps: list[tuple[mmap.mmap, Any]] = []
        """All mappings so far: they stay, because addresses in them may be in use."""
        self._address = 0

    def fill(self, row: int, matcher: LLMatcher) -> None:
        """Compute the matcher's next mask into this row of the table."""
        if row >= self._rows:
            self._rows = max(ROWS, 2 * row)
            os.ftruncate(self._file, self._rows * self.row_bytes)
            table = mmap.mmap(self._file, self._rows * self.row_bytes)
            held = ctypes.c_char.from_buffer(table)
            self._maps.append((table, held))
            self._address = ctypes.addressof(held)
        matcher.unsafe_compute_mask_ptr(self._address + row * self.row_bytes, self.row_bytes)
