"""The grammar processes of one worker: one per grammar in use, plus recently used ones.

A process that crashes or exceeds its limits of time or memory fails only the requests of its grammar. All processes end
with the worker: the template exits when its socket to the worker closes, and the kernel then ends its children.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from contextlib import ExitStack, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from engine.failures import Failure, FailureCode
from engine.grammar import wire
from engine.grammar.matcher import GrammarProcess, Matcher, grammar_failure
from engine.messages import MALFORMED, frame

if TYPE_CHECKING:
    from pathlib import Path

    from engine.sampling.params import Grammar

logger = logging.getLogger("engine")

MAX_PROCESSES = 128
MAX_YOUNG = 4
"""The most grammars that compile at once, not counting those that have been compiling for longer than `YOUNG_S`."""
YOUNG_S = 1.0
IMPATIENT_S = 5.0
"""When all processes are in use, one that has been compiling for longer than this many seconds is stopped."""
COMPILE_S, MASK_S = 120.0, 60.0
"""Wall-clock limits in seconds, for processes that get no CPU; their own limits are CPU time."""
KNOWN_BAD, KNOWN_BAD_S = 1024, 300.0
"""The number of failed grammars to remember, and the seconds to remember them."""
STRIKES = 2
"""Process deaths after which a grammar is refused without another attempt; a single one may have had other causes."""
RESTART_S = 5.0
IDLE_S = 60.0
"""Seconds after its last request after which a process ends; until then its grammar needs no compilation."""
ENDED = grammar_failure("it needs more time, memory or depth than a grammar may take")
UNAVAILABLE = grammar_failure("no grammars can be compiled at the moment")
NOT_NOW = Failure(FailureCode.OVERLOADED, {"wait_ms": 1000})
"""A new grammar finds no process, no memory or no file descriptor: another worker may have them, or this one later."""
NO_REASONING = grammar_failure("the model has no tokens for thoughts")


class GrammarProcesses:
    """Starts and stops grammar processes and passes their answers to requests. Only `wait` and `settle` block."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._load = wire.Load(str(tokenizer_file), vocab_size, eos_token_ids)
        self._known: OrderedDict[bytes, GrammarProcess] = OrderedDict()
        """By digest of the grammar, least recently requested first."""
        self._queue: list[GrammarProcess] = []
        self._bad: OrderedDict[bytes, tuple[Failure, int, float]] = OrderedDict()
        """Failed grammars by digest: the failure, the number of deaths, and the time of the last one."""
        self._started_template = -RESTART_S
        self._next_number = 1
        self._patience_s = 0.0
        self._open = _Open()
        self._live = self._open.processes
        self._finalizer = weakref.finalize(self, self._open.close)

    def start(self) -> bool:
        """Start the template process unless it runs, without waiting for it. False if it has just failed or cannot
        start.
        """
        opened = self._open
        if opened.template is not None:
            return True
        if time.monotonic() - self._started_template < RESTART_S:
            return False
        self._started_template = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                opened.template = subprocess.Popen(
                    [sys.executable, "-m", "engine.grammar.template", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # a worker's own standard output is its status
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"},
                )
            except OSError as error:
                logger.error("no template of grammar processes can be started: %s", error)
                ours.close()
                return False
        opened.connection = ours
        opened.epoll.register(ours, select.EPOLLIN)
        ours.setblocking(False)
        ours.sendall(frame(self._load))
        return True

    def open(self, grammar: Grammar) -> Matcher:
        """Create a matcher for a request. It becomes ready when the grammar is compiled, or fails."""
        self.poll()
        digest = blake2b(f"{grammar.kind}\0{grammar.text}".encode(), digest_size=16).digest()
        vocab_size = self._load.vocab_size
        process = self._known.get(digest)
        if process is None:
            process = GrammarProcess(digest, grammar)
            process.failure = self._refusal(digest)
            if process.failure is None:
                self._known[digest] = process
                self._queue.append(process)
        else:
            self._known.move_to_end(digest)
        matcher = Matcher(process, grammar, vocab_size)
        ids = (grammar.reasoning_begin, grammar.reasoning_end)
        if any(token is not None and not 0 <= token < vocab_size for token in ids):
            matcher.error = NO_REASONING
        self._start_queued()
        return matcher

    def poll(self) -> None:
        """Process received messages and timeouts."""
        for process in self._live.values():
            if process.waiting or not process.compiled:  # a large grammar needs several sends
                with suppress(OSError):  # its end is about to be read
                    process.flush()
        self._receive()
        now = time.monotonic()
        for process in [*self._live.values()]:
            since, limit_s = (
                (process.waiting_since, MASK_S) if process.compiled else (process.started or now, COMPILE_S)
            )
            if (process.waiting or not process.compiled) and now - since > limit_s:
                self._overran(process)
            elif not process.compiled and not process.users:
                self._drop(process)
        for process in [process for process in self._queue if not process.users]:
            self._queue.remove(process)
            self._known.pop(process.digest, None)
        self._start_queued()

    def wait(self, timeout_s: float) -> None:
        """Wait until a message arrives, at most `timeout_s`, and process it."""
        self._sleep(timeout_s)
        self.poll()

    def settle(self, patience_s: float) -> None:
        """Send this step's tokens, and wait up to `patience_s` for the next masks of processes that have been fast."""
        self._patience_s = patience_s
        busy = [process for process in self._live.values() if process.waiting and process.compiled]
        for process in busy:
            with suppress(OSError):
                process.flush()
        deadline = time.monotonic() + patience_s
        while any(process.waiting and not process.late and process.failure is None for process in busy):
            left = deadline - time.monotonic()
            if left <= 0:
                for process in busy:
                    process.late |= bool(process.waiting)
                return
            self._sleep(left)
            self._receive()

    def end_idle(self) -> None:
        """Stop the processes that nobody has used for IDLE_S."""
        now = time.monotonic()
        for process in [*self._live.values()]:
            if process.compiled and not process.users and now - process.idle_since > IDLE_S:
                self._drop(process)

    @property
    def users(self) -> int:
        """The number of requests with a grammar."""
        return sum(process.users for process in self._known.values())

    def close(self) -> None:
        """Stop all grammar processes and the template."""
        self._finalizer()

    def _sleep(self, timeout_s: float) -> None:
        select.select([self._open.epoll], [], [], timeout_s)  # epoll's own timeout is in whole milliseconds

    def _receive(self) -> None:
        for fd, _ in self._open.epoll.poll(0):
            process = self._open.by_fd.get(fd)
            if process is None:
                self._template_ended()
            else:
                self._receive_from(process)

    def _receive_from(self, process: GrammarProcess) -> None:
        assert process.socket is not None
        try:
            data = process.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            ended = self._open.template is None or self._open.template.poll() is not None
            return self._fail(process, UNAVAILABLE) if ended else self._overran(process)
        try:
            for body in process.received.feed(data):
                if self._ended_by(process, wire.from_process.decode(body)):
                    return
        except MALFORMED:  # whatever the grammar did to its process
            logger.exception("a grammar process sent what is no message")
            self._overran(process)

    def _ended_by(self, process: GrammarProcess, message: wire.Compiled | wire.Followed) -> bool:
        """Process one of its messages. Returns whether it is the last one."""
        if isinstance(message, wire.Followed):
            process.take(message, time.monotonic())
            process.late = message.seconds > self._patience_s
        elif message.error is None:
            process.map(message.row_bytes)
        else:
            process.failure = grammar_failure(message.error)
            self._remember(process, process.failure, STRIKES)
            self._drop(process)
            return True
        return False

    def _template_ended(self) -> None:
        logger.error("the template of grammar processes ended; the next grammar starts another")
        for process in [*self._live.values()]:
            self._fail(process, UNAVAILABLE)
        self._open.end_template()

    def _fail(self, process: GrammarProcess, why: Failure) -> None:
        """Fail the process's requests, and stop it if it still runs."""
        process.failure = why
        self._drop(process)

    def _overran(self, process: GrammarProcess) -> None:
        """Fail the process because its grammar exceeded a limit or crashed it, and remember a grammar that did not
        compile.
        """
        if not process.compiled:
            _, strikes, _ = self._bad.get(process.digest, (ENDED, 0, 0.0))
            self._remember(process, ENDED, strikes + 1)
        self._fail(process, ENDED)

    def _drop(self, process: GrammarProcess) -> None:
        self._known.pop(process.digest, None)
        self._open.drop(process)

    def _remember(self, process: GrammarProcess, why: Failure, strikes: int) -> None:
        self._bad[process.digest] = (why, strikes, time.monotonic())
        self._bad.move_to_end(process.digest)
        if len(self._bad) > KNOWN_BAD:
            self._bad.popitem(last=False)

    def _refusal(self, digest: bytes) -> Failure | None:
        why, strikes, when = self._bad.get(digest, (ENDED, 0, 0.0))
        return why if strikes >= STRIKES and time.monotonic() - when < KNOWN_BAD_S else None

    def _start_queued(self) -> None:
        while self._queue and self._has_room():
            process = self._queue.pop(0)
            try:
                begun = self.start() and self._fork(process)
            except OSError as error:
                idle = self._idle()
                if idle is not None:  # what it holds may be what is missing
                    self._drop(idle)
                    self._queue.insert(0, process)
                    continue
                logger.error("no grammar process can be started: %s", error)
                begun = False
            if not begun:
                process.failure = NOT_NOW
                self._known.pop(process.digest, None)

    def _idle(self) -> GrammarProcess | None:
        """The process without users whose grammar was asked for longest ago; None if all are in use."""
        return next((p for p in self._known.values() if p.socket is not None and not p.users), None)

    def _fork(self, process: GrammarProcess) -> bool:
        """Ask the template to fork the process; raises OSError if its files cannot be opened."""
        assert self._open.connection is not None
        with ExitStack() as opened:
            ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
            table = os.memfd_create("masks")
            opened.callback(os.close, table)
            ours.setblocking(False)
            message = frame(wire.Fork(self._next_number))
            socket.send_fds(self._open.connection, [message], [theirs.fileno(), table])
            theirs.close()
            opened.pop_all()
        process.begin(self._next_number, ours, table)
        self._open.add(process)
        self._next_number += 1
        return True

    def _has_room(self) -> bool:
        """Whether another process may start. Stops an unused or a slow-compiling one to make room."""
        now = time.monotonic()
        compiling = [p for p in self._live.values() if not p.compiled]
        if sum(now - (p.started or now) < YOUNG_S for p in compiling) >= MAX_YOUNG:
            return False
        if len(self._live) < MAX_PROCESSES:
            return True
        idle = self._idle()
        if idle is not None:
            self._drop(idle)
            return True
        oldest = min(compiling, key=lambda p: p.started or now, default=None)
        if oldest is not None and now - (oldest.started or now) > IMPATIENT_S:
            self._overran(oldest)
            return True
        return False


class _Open:
    """The sockets and processes to close. Holds no reference to its owner, so that a finalizer can use it."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.template: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.processes: dict[int, GrammarProcess] = {}
        self.by_fd: dict[int, GrammarProcess] = {}

    def add(self, process: GrammarProcess) -> None:
        assert process.socket is not None
        self.processes[process.number] = process
        self.by_fd[process.socket.fileno()] = process
        self.epoll.register(process.socket, select.EPOLLIN)

    def drop(self, process: GrammarProcess) -> None:
        if process.socket is None:
            return
        del self.processes[process.number], self.by_fd[process.socket.fileno()]
        self.epoll.unregister(process.socket)
        process.close()
        if self.connection is not None:
            with suppress(OSError):  # it ends with the template
                self.connection.send(frame(wire.Kill(process.number)))

    def end_template(self) -> None:
        if self.connection is not None and self.template is not None:
            self.epoll.unregister(self.connection)
            self.connection.close()
            self.template.kill()
            self.template.wait()
        self.connection = self.template = None

    def close(self) -> None:
        for process in [*self.processes.values()]:
            self.drop(process)
        self.end_template()
        self.epoll.close()
