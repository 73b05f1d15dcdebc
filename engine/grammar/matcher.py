"""The worker's side of a grammar process and of the requests that use its grammar. It never waits for the process."""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.failures import Failure, FailureCode
from engine.grammar.wire import FIRST, Compile, Follow
from engine.messages import FrameBuffer, ProtocolError, frame

if TYPE_CHECKING:
    import socket

    from engine.grammar.wire import Followed
    from engine.sampling.params import Grammar


NOTHING_FOLLOWS = "the text is complete already"


def grammar_failure(reason: str) -> Failure:
    """The failure of a request whose grammar failed; its client reads `reason`."""
    return Failure(FailureCode.GRAMMAR, {"reason": reason})


class GrammarProcess:
    """The worker's side of one grammar process and its mask table. Never blocks."""

    def __init__(self, digest: bytes, grammar: Grammar) -> None:
        self.digest = digest
        self.users = 0
        self.idle_since = 0.0
        """When its last request ended, in monotonic seconds."""
        self.compiled = False
        self.failure: Failure | None = None
        self.late = False
        """Whether its last masks took longer than the step loop waits for masks."""
        self.started: float | None = None
        """When the process was requested from the template, in monotonic seconds; None while it is queued."""
        self.waiting: dict[int, Matcher | None] = {}
        """The requests that wait for a mask, by row; None for a request that has ended meanwhile."""
        self.waiting_since = 0.0
        self.number = 0
        self.socket: socket.socket | None = None
        self.table = -1
        self._unsent = bytearray(frame(Compile(grammar.kind, grammar.text)))
        self.received = FrameBuffer()
        self._tokens: list[tuple[int, list[int]]] = []
        self._freed: list[int] = []
        self._free_rows: list[int] = []
        self._next_row = FIRST + 1
        self._row_bytes = 0
        self._masks = np.empty((0, 0), dtype=np.uint8)

    def begin(self, number: int, connection: socket.socket, table: int) -> None:
        """Called when the process has been requested from the template under this number."""
        self.number, self.socket, self.table, self.started = number, connection, table, time.monotonic()
        self.flush()

    def map(self, row_bytes: int) -> None:
        """Called when the grammar is compiled; `row_bytes` is the width of the mask table."""
        self.compiled, self._row_bytes = True, row_bytes
        self.waiting_since = time.monotonic()  # replayed tokens have been waiting for the compilation

    def mask(self, row: int) -> np.ndarray:
        """One row of the mask table: [row_bytes] uint8."""
        if row >= len(self._masks):
            table = mmap.mmap(self.table, os.fstat(self.table).st_size, access=mmap.ACCESS_READ)
            self._masks = np.frombuffer(table, dtype=np.uint8).reshape(-1, self._row_bytes)
        found: np.ndarray = self._masks[row]
        return found

    def follow(self, matcher: Matcher, row: int, tokens: list[int]) -> int:
        """Queue a matcher's next tokens for `flush`; returns the row that the mask after them will be in."""
        if row == FIRST:
            if not self._free_rows:
                self._free_rows.append(self._next_row)
                self._next_row += 1
            row = self._free_rows.pop()
        if not self.waiting:
            self.waiting_since = time.monotonic()
        self.waiting[row] = matcher
        self._tokens.append((row, tokens))
        return row

    def free(self, row: int) -> None:
        """Free the row of a request that has ended."""
        if row in self.waiting:
            self.waiting[row] = None  # until then its mask may still be written there
        else:
            self._freed.append(row)
            self._free_rows.append(row)

    def take(self, message: Followed, now: float) -> None:
        """Process a message about received masks; `now` in monotonic seconds. Raises ProtocolError for a row that waits for none."""
        for row, complete, error in message.rows:
            if row not in self.waiting:
                raise ProtocolError(f"row {row} waits for no mask")
            matcher = self.waiting.pop(row)
            if matcher is None:
                self.free(row)
            else:
                matcher.answered(complete, error)
        self.waiting_since = now

    def flush(self) -> None:
        """Send as much as the socket accepts; raises OSError if the process has ended."""
        if self._tokens:
            self._unsent += frame(Follow(self._freed, self._tokens))
            self._freed, self._tokens = [], []
        if self._unsent and self.socket is not None:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def close(self) -> None:
        """Close the socket and the mask table; requests that use the process cannot continue."""
        if self.socket is not None:
            self.socket.close()
            os.close(self.table)
            self.socket = None


class Matcher:
    """The grammar state of one request."""

    def __init__(self, process: GrammarProcess, grammar: Grammar, vocab_size: int) -> None:
        """`vocab_size`: the model's number of logits; its tokenizer may have more tokens."""
        self.error: Failure | None = None
        """Why the grammar failed for this request; None unless it did."""
        self.complete = False
        """Whether the grammar allows no further token."""
        self._reasoning_begin, self._reasoning_end = grammar.reasoning_begin, grammar.reasoning_end
        self._reasoning = grammar.reasoning
        self._process, self._vocab_size = process, vocab_size
        self._row = FIRST
        self._replaying = False
        process.users += 1

    @property
    def failure(self) -> Failure | None:
        """Why the request cannot continue: its own failure or its process's."""
        return self.error or self._process.failure

    @property
    def ready(self) -> bool:
        """Whether the next token may be sampled: the grammar is compiled and the mask of the last token has arrived."""
        return self._process.compiled and (self._row == FIRST or self._row not in self._process.waiting)

    def forbidden(self) -> torch.Tensor:
        """The tokens that may not come next: [V] bool. Call only when `ready`."""
        if self._reasoning:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        unpacked = np.unpackbits(~self._process.mask(self._row), bitorder="little", count=self._vocab_size)
        forbidden = torch.from_numpy(unpacked.view(np.bool_))
        if self._reasoning_begin is not None:
            forbidden[self._reasoning_begin] = False
        return forbidden

    def advance(self, token: int) -> None:
        """Record a sampled token."""
        if self._constrains(token):
            self._row = self._process.follow(self, self._row, [token])

    def replay(self, tokens: list[int]) -> None:
        """Record the tokens that the sequence has already; called once, before the first `advance`. The matcher fails
        if the grammar does not accept them, or accepts nothing after them.
        """
        constrained = [token for token in tokens if self._constrains(token)]
        if constrained:
            self._replaying = True
            self._row = self._process.follow(self, self._row, constrained)

    def answered(self, complete: bool, error: str | None) -> None:
        """Record the process's answer: whether the grammar allows no further token, and why it failed, if it did."""
        if complete and self._replaying:
            error = NOTHING_FOLLOWS
        self.complete, self.error, self._replaying = complete, None if error is None else grammar_failure(error), False

    def _constrains(self, token: int) -> bool:
        """Whether the next token is in the grammar's part of the output, not in the reasoning before it."""
        begins, self._reasoning_begin = token == self._reasoning_begin, None  # reasoning comes first or not at all
        if begins or self._reasoning:
            self._reasoning = token != self._reasoning_end
            return False
        return True

    def close(self) -> None:
        """Release the row and the process; called when the request ends."""
        self._process.users -= 1
        self._process.idle_since = time.monotonic()
        if self._row != FIRST:
            self._process.free(self._row)
