"""The compiled half of the thread pool: one caller and its helpers share the work of a kernel. It uses no Python
threads.

A kernel takes its work by ticket, so any number of workers may run it, and a late worker finds no tickets left. The
caller always works itself and does not depend on helpers. A job ends when no tickets are left and every helper that has
*entered* it has left again; the caller does not wait for a helper that sleeps or has not been scheduled.

Workers synchronise by one atomic word, the gate: `generation << 32 | WAITING | OPEN | helpers inside`.

1. The caller, alone in the pool (BUSY), writes kernel and arguments while the gate is closed and no helper is inside,
   then sets the gate to a new generation, OPEN. If helpers sleep and the job is large enough, it wakes them (futex).
2. A helper that sees an open gate of a generation that it has not entered yet increments the word by compare-and-swap.
   If that succeeds, the gate was open at that moment, so kernel and arguments belong to this generation and do not
   change until the helper has left; if it fails, the helper reads the gate again. It enters a generation only once, so
   that a job never has more workers than threads, for which kernels have scratch memory.
3. The caller takes tickets until there are none, then clears OPEN: from then on no helper enters, and a helper inside
   finishes at most one piece of work. The caller spins on the gate for a while, then sets WAITING and sleeps on the
   gate; the last helper to leave a gate with WAITING wakes it.

So a late helper reads nothing of a job but the gate; the gate and the memory beside it are never freed.
A caller that finds the pool busy (another thread's job) runs its kernel alone.

Helpers spin for a bounded time until the next job, then sleep on the bell (a futex) and cost nothing. A missed wake-up
would only cost time; none is missed, because a helper announces that it sleeps before it reads the gate a last time.

A helper that the caller waits for checks whether it was preempted (ru_nivcsw). If such waits take a good part of the time, the
caller works alone for a while, longer if it happens again, and lets the helpers sleep: two threads on less than two
cores wait for each other more than they help. Waits that are rarer, as beside a server that passes each step's tokens on, cost
less than working alone would.
"""

from __future__ import annotations

from typing import Any

from engine.cpu.kernels.compiled import inlined, kernel
from engine.cpu.kernels.simd import (
    add_atomic,
    address_of,
    call_kernel,
    call_system,
    clock_ns,
    compare_exchange,
    exchange,
    load_acquired,
    load_int,
    lost_core,
    store_int,
)

LINE = 8
"""int64 numbers in a cache line; words that different threads write are in different lines."""
GATE, BELL, SLEEPING, BUSY, STOP, JOB, ALONE, FIXED = (LINE * i for i in range(8))
STATE_BYTES = 8 * LINE * 8
KERNEL, ARGUMENTS, GENERATION = JOB, JOB + 1, JOB + 2
UNTIL, PENALTY, STALLED, SINCE, LOST = ALONE, ALONE + 1, ALONE + 2, ALONE + 3, ALONE + 4
"""The time until which the caller works alone, and how long that is; whether a helper lost its core while the caller waited;
since when such waits are added up, and their sum. Nanoseconds, times on the monotonic clock.
"""
SYSCALL, CLOCK, FUTEX, USAGE, HELPER_NS, CALLER_NS = FIXED, FIXED + 1, FIXED + 2, FIXED + 3, FIXED + 4, FIXED + 5
"""Addresses of libc's `syscall` and `clock_gettime`, the numbers of the futex and the getrusage call, and how long
helpers and the caller look at a word before they sleep on it.
"""

OPEN, WAITING, INSIDE = 1 << 16, 1 << 17, (1 << 16) - 1
WAIT, WAKE, EVERYBODY = 128, 129, (1 << 31) - 1
"""FUTEX_WAIT and FUTEX_WAKE, private to this process."""
SHORTEST_NS, LONGEST_NS, GROWTH = 8_000_000, 128_000_000, 4
"""How long the caller works alone, in nanoseconds: the first time, the longest time, and the factor from one time to the next."""
WINDOW_NS, MOST_LOST_NS, PART_LOST = 100_000_000, 8_000_000, 3
"""Waits are added up for about this long. The caller works alone after waits of this sum, a few time slices, if they are more than
one of so many parts of the time: beside a process that is always busy they are about half of it.
"""

HEADER = 5
"""What stands before a kernel's own arguments in `share`'s: the pool's state (0: none), whether to wake helpers that
sleep, the number of kernels, two kernels.
"""


@inlined
def _futex(state: int, word: int, operation: int, value: int) -> None:
    """Wait while the lower half of the word is `value`, or wake `value` waiters; the lower half is first
    (little-endian).
    """
    call_system(load_int(state, SYSCALL), load_int(state, FUTEX), state + 8 * word, operation, value)


@inlined
def _open(state: int, function: int, arguments: int, wake: int) -> None:
    store_int(state, KERNEL, function)
    store_int(state, ARGUMENTS, arguments)
    generation = load_int(state, GENERATION) + 1 & 0x7FFFFFFF
    store_int(state, GENERATION, generation)
    exchange(state + 8 * GATE, generation << 32 | OPEN)
    if wake and load_acquired(state + 8 * SLEEPING):
        exchange(state + 8 * SLEEPING, 0)
        add_atomic(state + 8 * BELL, 1)
        _futex(state, BELL, WAKE, EVERYBODY)


@inlined
def _close(state: int) -> None:
    """Close the gate and wait until all helpers have left."""
    gate = state + 8 * GATE
    if (add_atomic(gate, -OPEN) & INSIDE) == 0:
        return
    clock = load_int(state, CLOCK)
    begin = now = clock_ns(clock)
    while now - begin < load_int(state, CALLER_NS):
        if (load_acquired(gate) & INSIDE) == 0:
            return
        now = clock_ns(clock)
    word = add_atomic(gate, WAITING) + WAITING
    while (word & INSIDE) != 0:
        _futex(state, GATE, WAIT, word & 0xFFFFFFFF)
        word = load_acquired(gate)
    if exchange(state + 8 * STALLED, 0):
        now = clock_ns(clock)
        if now - load_int(state, SINCE) > WINDOW_NS:
            store_int(state, SINCE, begin)
            store_int(state, LOST, 0)
        lost = load_int(state, LOST) + now - begin
        store_int(state, LOST, lost)
        if lost < MOST_LOST_NS or lost * PART_LOST < now - load_int(state, SINCE):
            return
        store_int(state, SINCE, 0)
        soon = now - load_int(state, UNTIL) < 8 * load_int(state, PENALTY)
        penalty = min(GROWTH * load_int(state, PENALTY), LONGEST_NS) if soon else SHORTEST_NS
        store_int(state, PENALTY, penalty)
        store_int(state, UNTIL, now + penalty)


@inlined
def _share(header: int) -> None:
    state, arguments = load_int(header, 0), header + 8 * HEADER
    shared = False
    if state != 0 and exchange(state + 8 * BUSY, 1) == 0:
        shared = True
    for number in range(load_int(header, 2)):
        function = load_int(header, 3 + number)
        store_int(arguments, 0, 0)
        store_int(arguments, 1, 0)
        if shared and clock_ns(load_int(state, CLOCK)) >= load_int(state, UNTIL):
            _open(state, function, arguments, load_int(header, 1))
            call_kernel(function, arguments)
            _close(state)
        else:
            call_kernel(function, arguments)
    if shared:
        exchange(state + 8 * BUSY, 0)


@kernel
def share(data: Any) -> None:
    """Run one or two kernels, the second after the whole first, over the same arguments: HEADER, two
    tickets, the rest.
    """
    _share(address_of(data))


@kernel
def replay(data: Any) -> None:
    """Run calls one after another. Arguments: the address of the first call's header, their number, bytes from one to the
    next.
    """
    a = address_of(data)
    header = load_int(a, 0)
    for _ in range(load_int(a, 1)):
        _share(header)
        header += load_int(a, 2)


@kernel
def helper(data: Any) -> None:
    """The loop of a helper thread, until the pool is stopped."""
    state = address_of(data)
    gate, clock, patience = state + 8 * GATE, load_int(state, CLOCK), load_int(state, HELPER_NS)
    entered, since = 0, clock_ns(clock)
    losses = lost_core(load_int(state, SYSCALL), load_int(state, USAGE))
    while load_acquired(state + 8 * STOP) == 0:
        word = load_acquired(gate)
        if (word & OPEN) != 0 and word >> 32 != entered:
            if compare_exchange(gate, word, word + 1):
                entered = word >> 32
                call_kernel(load_int(state, KERNEL), load_int(state, ARGUMENTS))
                if (load_acquired(gate) & WAITING) != 0:
                    before, losses = losses, lost_core(load_int(state, SYSCALL), load_int(state, USAGE))
                    if losses != before:
                        exchange(state + 8 * STALLED, 1)
                word = add_atomic(gate, -1)
                if (word & WAITING) != 0 and (word & INSIDE) == 1:
                    _futex(state, GATE, WAKE, EVERYBODY)
                since = clock_ns(clock)
            continue
        if clock_ns(clock) - since < patience:
            continue
        bell = load_acquired(state + 8 * BELL)
        exchange(state + 8 * SLEEPING, 1)
        word = load_acquired(gate)
        if ((word & OPEN) == 0 or word >> 32 == entered) and load_acquired(state + 8 * STOP) == 0:
            _futex(state, BELL, WAIT, bell & 0xFFFFFFFF)
        since = clock_ns(clock)
