"""The process that grammar processes are forked from: `python -m engine.grammar.template FD`.

It loads the tokenizer once, processes no client data, has one thread and never imports torch. FD is its socket to the
worker; when that closes, the template and all of its children end.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from engine.grammar import wire
from engine.grammar.serve import LONG_MASK_NICE, serve
from engine.messages import FrameBuffer

logger = logging.getLogger("engine")

WATCH_S = 0.25
BUSY_S = 0.1
"""Seconds of CPU time between two checks after which a child's priority is lowered."""
TOTAL_BYTES = 2 << 30
"""Limit of the memory of all children together."""
FILES = 16
"""The most file descriptors that one read receives."""


@dataclass(slots=True)
class _Child:
    number: int
    cpu_s: float = 0.0
    demoted: bool = False


class Template:
    """Forks, monitors and ends the grammar processes of one worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameBuffer()
        self._files: list[int] = []
        self._children: dict[int, _Child] = {}
        """By process id. An ended child's id is not reused before it is reaped here."""
        self._tokenizer: LLTokenizer | None = None

    def run(self) -> None:
        """Serve until the worker closes the connection."""
        next_watch = 0.0
        while True:
            left_s = max(0.0, next_watch - time.monotonic())
            ready, _, _ = select.select([self._connection], [], [], left_s if self._children else None)
            if ready and not self._receive():
                return
            self._reap()
            if time.monotonic() >= next_watch:  # however many messages come
                self._watch()
                next_watch = time.monotonic() + WATCH_S

    def _receive(self) -> bool:
        data, files, _, _ = socket.recv_fds(self._connection, 1 << 16, FILES)
        self._files += files
        for body in self._frames.feed(data):
            message = wire.to_template.decode(body)
            if isinstance(message, wire.Load):
                self._tokenizer = _load(message)
                gc.collect()
                gc.freeze()  # so that children leave these pages shared
            elif isinstance(message, wire.Fork):
                self._fork(message.number, *self._files[:2])
                del self._files[:2]
            else:
                for pid, child in self._children.items():
                    if child.number == message.number:
                        os.kill(pid, signal.SIGKILL)
        return bool(data)

    def _fork(self, number: int, connection: int, table: int) -> None:
        assert self._tokenizer is not None
        try:
            pid = os.fork()
        except OSError as error:  # no processes or no memory are left: only this grammar's requests fail
            logger.warning("grammar process %d: %s", number, error)
            os.close(connection)
            os.close(table)
            return
        if pid:
            self._children[pid] = _Child(number)
            os.close(connection)
            os.close(table)
            return
        try:
            self._connection.close()
            for file in self._files[2:]:
                os.close(file)
            serve(socket.socket(fileno=connection), table, self._tokenizer)
        finally:  # the child must never go on as a second template
            os._exit(1)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            child = self._children.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
                logger.warning("grammar process %d was ended by signal %d", child.number, os.WTERMSIG(status))

    def _watch(self) -> None:
        """Lower the priority of children that use much CPU; kill the largest if all together exceed TOTAL_BYTES."""
        own, total, largest = _anonymous_bytes(os.getpid()), 0, (0, 0)
        for pid, child in self._children.items():
            used = max(0, _anonymous_bytes(pid) - own)
            total, largest = total + used, max(largest, (used, pid))
            cpu_s = _cpu_s(pid)
            if cpu_s - child.cpu_s > BUSY_S and not child.demoted:
                os.setpriority(os.PRIO_PROCESS, pid, LONG_MASK_NICE)
                child.demoted = True
            child.cpu_s = cpu_s
        if total > TOTAL_BYTES:
            logger.warning("grammar processes use %d MiB; killing the largest", total >> 20)
            os.kill(largest[1], signal.SIGKILL)


def _anonymous_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _load(message: wire.Load) -> LLTokenizer:
    """Load the tokenizer, which may have more tokens than the model has logits, or fewer."""
    text = Path(message.tokenizer_file).read_text()
    known = max(Tokenizer.from_str(text).get_vocab(with_added_tokens=True).values()) + 1
    eos = [token for token in message.eos_token_ids if token < known]
    return LLTokenizer(text, n_vocab=max(known, message.vocab_size), eos_token=eos or None)


def main() -> NoReturn:
    """Serve the worker at the other end of the socket."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when to stop, and may have requests to finish
        signal.signal(number, signal.SIG_IGN)
    try:
        Template(socket.socket(fileno=int(sys.argv[1]))).run()
    except Exception:  # an outer boundary; the worker sees the connection close
        logger.exception("the template of grammar processes failed")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
