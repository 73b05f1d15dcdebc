"""Run a compiled kernel on torch's own OpenMP threads.

A second pool of threads would fight with torch's for the same cores, so the parallel region is opened in the very
OpenMP library that torch has loaded (its stable entry point `GOMP_parallel`, which LLVM's and Intel's libraries export
too). Where there is none, kernels run on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch

TICKETS = 2
"""The first two numbers of a kernel's arguments count tickets: of work, and of workers."""


@cache
def _parallel() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP library in this process."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in sorted({line.split()[-1] for line in mapped if "omp" in line.rsplit("/", 1)[-1]}):
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def num_threads() -> int:
    """How many workers `run` may use."""
    return torch.get_num_threads() if _parallel() else 1


def run(kernel: Any, *args: int, parallel: bool = True) -> None:
    """Call the compiled `kernel` (a Numba cfunc) with addresses and numbers; returns when every worker is done."""
    data = (ctypes.c_int64 * (TICKETS + len(args)))(0, 0, *args)
    threads = num_threads() if parallel else 1
    if threads == 1:
        kernel.ctypes(ctypes.addressof(data))
    else:
        _parallel()(kernel.address, ctypes.addressof(data), threads, 0)


def float_bits(value: float) -> int:
    """A float32 among a kernel's arguments."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
