"""The pool of kernel threads: who works on a job, who is waited for, and what is left of it in a forked process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from functools import cache
from typing import Any

import pytest
import torch

from engine.cpu.kernels import ops, pool, threads
from engine.cpu.kernels.compiled import kernel
from engine.cpu.kernels.simd import address_of, load_acquired, load_int, store_int, take_ticket
from tests.waiting import wait_until

LARGE = threads.WAKING + 1


@pytest.fixture(autouse=True)
def _one_thread_again():
    yield
    threads.set_num_threads(1)


@cache
def meeting_kernel() -> Any:
    """Waits until so many workers have come. Arguments: how many; where the number of those that came goes."""

    @kernel
    def meeting(data: Any) -> None:
        a = address_of(data)
        take_ticket(a + 8)
        while load_acquired(a + 8) < load_int(a, 2):
            pass
        store_int(load_int(a, 3), 0, load_acquired(a + 8))

    return meeting


def meet(workers: int, work: int = LARGE) -> int:
    came = ctypes.c_int64(0)
    threads.run(meeting_kernel(), workers, ctypes.addressof(came), work=work)
    return came.value


def until(condition) -> None:
    wait_until(condition, 60, every_s=0.001)


@pytest.mark.parametrize("count", [2, 4])
def test_helpers_come_to_a_job_again_and_again(count):
    threads.set_num_threads(count)
    for _ in range(20):
        threads._pool._words[pool.UNTIL] = 0  # whatever else this machine does
        assert meet(count) == count


def test_helpers_that_do_not_come_are_not_waited_for():
    """A helper that the system does not run is one that never looks at the gate."""
    threads.set_num_threads(3)
    threads._pool.stop()
    assert meet(1) == 1
    x, weight = torch.randn(64, 128), torch.randn(640, 128)
    packed, out = ops.pack_weight(weight), torch.empty(64, 640)
    ops.linear(x, packed, None, out)
    assert torch.allclose(out, x @ weight.T, atol=1e-3)


def test_a_helper_that_is_inside_is_waited_for():
    """Both workers of a job come; the one that stays behind writes the last word, whether that is the helper or not."""

    @kernel
    def straggler(data: Any) -> None:
        a = address_of(data)
        number = take_ticket(a + 8)
        while load_acquired(a + 8) < 2:
            pass
        if number == 1:
            store_int(load_int(a, 3), 0, 2)
            while load_acquired(load_int(a, 2)) == 0:
                pass
            store_int(load_int(a, 3), 0, 1)

    threads.set_num_threads(2)
    for _ in range(20):
        threads._pool._words[pool.UNTIL] = 0
        words = (ctypes.c_int64 * 2)()
        address = ctypes.addressof(words)
        found = []

        def one(address=address, words=words, found=found) -> None:
            threads.run(straggler, address, address + 8, work=LARGE)
            found.append(words[1])

        caller = threading.Thread(target=one)
        caller.start()
        until(lambda words=words: words[1] == 2)  # the second has come; a helper that was first is gone again
        words[0] = 1
        caller.join()
        assert found == [1]


def test_the_system_took_a_helpers_core():
    """The caller works alone until some time has passed, and longer after each time."""
    threads.set_num_threads(2)
    words = threads._pool._words
    words[pool.UNTIL] = 1 << 62
    assert threads.crowded()
    assert meet(1) == 1
    words[pool.UNTIL] = 0
    assert not threads.crowded()
    assert meet(2) == 2


def test_little_work_is_for_the_caller_alone():
    threads.set_num_threads(2)
    assert meet(1, work=threads.SERIAL) == 1
    until(lambda: threads._pool._words[pool.SLEEPING])
    bells = threads._pool._words[pool.BELL]
    assert meet(1, work=threads.WAKING) == 1
    assert threads._pool._words[pool.BELL] == bells


def test_idle_helpers_sleep():
    threads.set_num_threads(2)
    until(lambda: threads._pool._words[pool.SLEEPING])
    meet(2)
    until(lambda: threads._pool._words[pool.SLEEPING])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_callers_at_once(dtype):
    """The second finds the pool taken and computes alone; neither sees anything of the other's job, nor of the room for its sums in parts."""
    threads.set_num_threads(2)
    inner = 128 if dtype == torch.float32 else 6000
    weights = [torch.randn(640, inner).to(dtype) for _ in range(2)]
    wrong: list[int] = []

    def one(number: int) -> None:
        x, packed = torch.randn(64, inner).to(dtype), ops.pack_weight(weights[number])
        expected = x.float() @ weights[number].float().T
        for _ in range(200):
            out = torch.empty(64, 640, dtype=dtype)
            ops.linear(x, packed, None, out)
            if not torch.allclose(out.float(), expected, atol=1e-3 if dtype == torch.float32 else 3.0):
                wrong.append(number)

    callers = [threading.Thread(target=one, args=[number]) for number in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_more_threads_than_cores_over_many_short_jobs():
    threads.set_num_threads(8)
    x, weight = torch.randn(13, 64), torch.randn(320, 64)
    packed = ops.pack_weight(weight)
    outs = [torch.empty(13, 320) for _ in range(2000)]
    for out in outs:
        threads._pool._words[pool.UNTIL] = 0
        ops.linear(x, packed, None, out)
    assert all(torch.equal(out, outs[0]) for out in outs)


FORKS = """
import os
import torch
from engine.cpu.kernels import ops, threads

x, weight = torch.randn(64, 128), torch.randn(640, 128)
packed, out, found = ops.pack_weight(weight), torch.empty(64, 640), torch.empty(64, 640)
threads.set_num_threads(2)
ops.linear(x, packed, None, out)
child = os.fork()
assert threads.num_threads() == (2 if child else 1)
threads.set_num_threads(2)
ops.linear(x, packed, None, found)
assert torch.equal(out, found)
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_has_helpers_of_its_own_and_both_end():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # what torch's own threads do in a fork is another matter
    subprocess.run([sys.executable, "-c", FORKS], check=True, env=environment)
