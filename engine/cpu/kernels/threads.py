"""Run compiled kernels on the calling thread and on helper threads of a pool of our own (`engine.cpu.kernels.pool`).

Not on torch's OpenMP threads: the barrier at the end of a parallel region there waits for every thread, also for one
that the system does not run because another process has its core. Where there is no futex (outside of Linux), kernels
run on the calling thread alone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import struct
import sys
import time
from contextlib import contextmanager
from threading import Lock, Thread, local
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cpu.kernels import pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_ARGUMENTS = 32
TICKETS = 2
"""The first two numbers of a kernel's arguments count tickets: of work, and of workers."""
CALL_WORDS = pool.HEADER + TICKETS + MAX_ARGUMENTS
SERIAL, WAKING = 1 << 13, 1 << 15
"""Amounts of work up to which helpers are not used, and up to which sleeping helpers are not woken, because they would
take longer to start than they save. The unit is a product of 32 numbers with a row's, about a nanosecond.
"""
HELPER_NS = 100_000
"""Nanoseconds that helpers spin before they sleep: longer than the time between two kernels of a step."""
CALLER_NS = 1_000_000
"""How long the caller looks whether the last helper has left before it sleeps, and takes the helper for one that has
lost its core. The system takes a core away for some tenths of a millisecond on an idle machine too, and working alone
for that costs more: with 0.1 ms steps of 32 sequences took a quarter longer, more than a third of them computed alone.
"""
CALLS = {"x86_64": (202, 98), "aarch64": (98, 165)}
"""Linux's numbers of the futex and the getrusage call."""


class Pool:
    """Helper threads, daemons that sleep while there is nothing to do."""

    def __init__(self, helpers: int) -> None:
        libc = ctypes.CDLL(None)
        libc.aligned_alloc.restype = ctypes.c_void_p
        libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        # Never freed: a helper may read it at any time until the process ends.
        self.state: int = libc.aligned_alloc(64, pool.STATE_BYTES)
        ctypes.memset(self.state, 0, pool.STATE_BYTES)
        self._words = (ctypes.c_int64 * (pool.STATE_BYTES // 8)).from_address(self.state)
        for place, value in (
            (pool.SYSCALL, ctypes.cast(libc.syscall, ctypes.c_void_p).value),
            (pool.CLOCK, ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value),
            (pool.FUTEX, CALLS[platform.machine()][0]),
            (pool.USAGE, CALLS[platform.machine()][1]),
            (pool.HELPER_NS, HELPER_NS),
            (pool.CALLER_NS, CALLER_NS),
        ):
            self._words[place] = value or 0
        self._libc = libc
        self._helpers = [
            Thread(target=pool.helper.ctypes, args=[self.state], name=f"kernel-helper-{i}", daemon=True)
            for i in range(helpers)
        ]
        for thread in self._helpers:
            thread.start()

    def crowded(self) -> bool:
        """Whether the caller currently works alone because a helper was preempted."""
        return time.monotonic_ns() < self._words[pool.UNTIL]

    def stop(self) -> None:
        """End the helper threads; running kernels go on."""
        self._words[pool.STOP] = 1
        self._words[pool.BELL] += 1
        self._libc.syscall(
            CALLS[platform.machine()][0], ctypes.c_void_p(self.state + 8 * pool.BELL), pool.WAKE, pool.EVERYBODY
        )
        for thread in self._helpers:
            thread.join()


class Program:
    """The kernel calls of some layers, which are run again without Python between them.

    Its owner drops it when an address among the arguments stops being valid, and when helpers are started or stopped
    (`pool_state`).
    """

    def __init__(self) -> None:
        self.kept: list[object] = []
        """What owns memory that only the recorded calls use."""
        self._calls: list[bytes] = []
        self._labels: list[str] = []
        self._ends: list[int] = []
        self._words = np.empty((0, CALL_WORDS), np.int64)
        self._places: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def add(self, label: str, words: bytes) -> None:
        """One more call. Calls whose arguments change from step to step have a label."""
        self._calls.append(words)
        self._labels.append(label)

    def end_layer(self) -> None:
        """The calls so far are whole layers."""
        self._ends.append(len(self._calls))

    def close(self) -> None:
        """Nothing more is recorded."""
        self._words = np.frombuffer(b"".join(self._calls), np.int64).reshape(-1, CALL_WORDS).copy()
        labels = np.array(self._labels)
        self._places = {label: np.flatnonzero(labels == label) for label in set(self._labels)}
        self._calls = []

    def change(self, label: str, values: Sequence[int], work: int, wakes: bool) -> None:
        """Put `values` in place of the first arguments of every call with this label, for a step of so much work."""
        places = self._places[label]
        self._words[places, :2] = _sharing(work, wakes)
        first = pool.HEADER + TICKETS
        self._words[places, first : first + len(values)] = values

    def replay(self, moved: Callable[[], None]) -> None:
        """Run the calls; `moved` is called after each layer."""
        begin, stride, first = 0, self._words.strides[0], self._words.ctypes.data
        arguments = (ctypes.c_int64 * 3)()
        for end in self._ends:
            arguments[:] = [first + begin * stride, end - begin, stride]
            pool.replay.ctypes(ctypes.addressof(arguments))
            begin = end
            moved()


class _Data:
    """Room for a kernel's arguments, of which every calling thread has its own; packing them is much faster than a new
    array.
    """

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * CALL_WORDS)()
        self.address = ctypes.addressof(self.words)
        self.program: Program | None = None
        """What records this thread's calls."""


_local = local()
_packers = [struct.Struct(f"{pool.HEADER + TICKETS + count}q") for count in range(MAX_ARGUMENTS + 1)]
_threads = 1
_pool: Pool | None = None
_lock = Lock()


def can_share() -> bool:
    """Whether there can be helpers: Linux's futex on a CPU whose calls are known and whose lower halves come first."""
    return sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in CALLS


def num_threads() -> int:
    """How many workers `run` may use."""
    return _threads


def crowded() -> bool:
    """Whether helpers were lately found to have lost their cores to other processes."""
    helped = _pool
    return helped is not None and helped.crowded()


def set_num_threads(threads: int) -> None:
    """Set the number of kernel threads, at least 1, the caller included. Starts or stops helpers."""
    global _threads, _pool
    with _lock:
        threads = threads if can_share() else 1
        if threads == _threads:
            return
        before, _pool, _threads = _pool, None, 1
        if before is not None:
            before.stop()
        if threads > 1:
            _pool = Pool(threads - 1)
        _threads = threads


def _forget() -> None:
    """In a forked child, which has no helpers: it gets its own when it next asks for threads."""
    global _threads, _pool, _lock
    _threads, _pool, _lock = 1, None, Lock()


os.register_at_fork(after_in_child=_forget)
# Before the interpreter frees the compiled code that helpers run.
atexit.register(set_num_threads, 1)


def _data() -> _Data:
    try:
        data: _Data = _local.data
    except AttributeError:
        data = _local.data = _Data()
    return data


@contextmanager
def recording() -> Iterator[Program]:
    """A program of this thread's calls inside the block, which run as ever."""
    data, program = _data(), Program()
    data.program = program
    try:
        yield program
        program.close()
    finally:
        data.program = None


def keep(owner: object) -> None:
    """Let the program that records this thread's calls, if any, own memory that they use."""
    program = _data().program
    if program is not None:
        program.kept.append(owner)


def pool_state() -> int:
    """What differs after helpers were started or stopped."""
    helped = _pool
    return 0 if helped is None else helped.state


def _sharing(work: int, wakes: bool) -> tuple[int, int]:
    """The first two words of a call: the pool's state, and whether to wake sleeping helpers."""
    return pool_state() if work > SERIAL else 0, int(wakes and work > WAKING)


def run(kernel: Any, *args: int, work: int, wakes: bool = True, after: Any = None, label: str = "") -> None:
    """Call the compiled `kernel` (a Numba cfunc) with addresses and numbers, and then the one `after` it with the same;
    returns when every worker is done. `work` is how much there is to do, see SERIAL; `wakes`: also sleeping helpers.
    `label` names the call for `Program.change`.
    """
    number, second = (1, 0) if after is None else (2, after.address)
    data = _data()
    _packers[len(args)].pack_into(data.words, 0, *_sharing(work, wakes), number, kernel.address, second, 0, 0, *args)
    if data.program is not None:
        data.program.add(label, bytes(data.words))
    pool.share.ctypes(data.address)


def float_bits(value: float) -> int:
    """A float32 among a kernel's arguments."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
