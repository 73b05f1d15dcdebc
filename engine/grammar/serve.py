"""What a grammar process does: compile one grammar, then follow it for every request that has it.

It may crash or be ended at any moment; nobody but those requests depends on it. It never talks to the template.
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
"""The most that a token and the mask behind it may take, in seconds of CPU time."""
REQUEST_CPU_S = 30.0
"""The most that all masks of one request may take together: one that needs half a second for each token ends."""
TOGETHER_S = 0.002
"""How long the first masks of a step wait to be sent with the others."""
MEMORY_BYTES = 1 << 30
"""Of address space, beside what the template has and the stack."""
COMPILE_STACK_BYTES = 256 << 20
"""Of the thread that compiles: llguidance recurses as deep as a grammar's rules refer to each other."""
MASKS_STACK_BYTES = 64 << 20
NICE, COMPILE_NICE, LONG_COMPILE_NICE, LONG_MASK_NICE = 5, 10, 12, 15
"""The step loop goes first. While it waits for masks it leaves them its core. `template` sees to those whose masks take long.
Where steps keep every core busy, a process at 12 still gets a sixteenth of one, and one at 19 hardly anything.
"""
PATIENT_CPU_S = 5.0
"""A compilation that takes more of CPU time gives way to everything else."""
IN_VAIN = "it is too large, or nested too deeply"
TOO_SLOW = "it takes too long to follow"
ROWS = 16
_PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket, table: int, tokenizer: LLTokenizer) -> NoReturn:
    """Until the connection ends. `table` is the file of the masks."""
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
    """Limits that nothing which runs here can lift. When the template ends, so does this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # some containers forbid it
        file.write("1000")  # where the machine's memory ends, this process is the one to go
    os.nice(NICE)
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, present + COMPILE_STACK_BYTES + MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, COMPILE_CPU_S)
    _limit(resource.RLIMIT_STACK, MASKS_STACK_BYTES)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a panic writes pages, which no client shall fill the log with
        os.dup2(nothing, stream)
    gc.disable()


def _limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
        soft = hard
    resource.setrlimit(kind, (soft, hard))


def _received(connection: socket.socket) -> Iterator[bytes]:
    """Message bodies until the other side is gone."""
    frames = FrameBuffer()
    while data := connection.recv(1 << 16):
        yield from frames.feed(data)
    os._exit(0)


def _compiled(asked: Compile, tokenizer: LLTokenizer, masks: _Masks) -> tuple[LLMatcher | None, str | None]:
    """The matcher, and its first mask in the table; or why not."""
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
        except Exception as error:  # a client's text meets several parsers here, and gbnf_to_lark raises plain ones
            done.append((None, _first_part(f"{error}")))
        except BaseException:  # what pyo3 makes of a panic
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
    """One request: how far it has got, and what that has cost."""

    matcher: LLMatcher
    cpu_s: float = 0.0


def _follow(
    message: Follow, compiled: LLMatcher, followers: dict[int, _Follower], masks: _Masks
) -> Iterator[wire.Followed]:
    """Answers for all rows: in one piece, unless that would let some wait for others' masks."""
    for row in message.freed:
        followers.pop(row, None)
    begin = time.perf_counter()
    answer = wire.Followed([], 0.0)
    for row, token in message.tokens:
        if answer.rows and time.perf_counter() - begin > TOGETHER_S:
            answer.seconds = time.perf_counter() - begin
            yield answer
            begin, answer = time.perf_counter(), wire.Followed([], 0.0)
        signal.setitimer(signal.ITIMER_PROF, MASK_CPU_S)  # nobody handles SIGPROF: it ends the process
        follower = followers.get(row)
        if follower is None:
            follower = followers[row] = _Follower(compiled.deep_copy())
        matcher, started = follower.matcher, time.thread_time()
        matcher.consume_token(token)
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
    """What a client may read: without the traces of a panic."""
    return IN_VAIN if not text or "panic" in text or "<backtrace>" in text else text[:500]


class _Masks:
    """The table, of which this side decides the size. It never shrinks."""

    def __init__(self, file: int, row_bytes: int) -> None:
        self._file, self.row_bytes = file, row_bytes
        self._rows = 0
        self._maps: list[tuple[mmap.mmap, Any]] = []
        """All of them: what was handed out as an address stays mapped."""
        self._address = 0

    def fill(self, row: int, matcher: LLMatcher) -> None:
        """Compute the mask of what may come next, and put it there."""
        if row >= self._rows:
            self._rows = max(ROWS, 2 * row)
            os.ftruncate(self._file, self._rows * self.row_bytes)
            table = mmap.mmap(self._file, self._rows * self.row_bytes)
            held = ctypes.c_char.from_buffer(table)
            self._maps.append((table, held))
            self._address = ctypes.addressof(held)
        matcher.unsafe_compute_mask_ptr(self._address + row * self.row_bytes, self.row_bytes)
