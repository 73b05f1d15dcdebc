"""Compiles kernels, and keeps the result in a cache directory.

Numba checks only whether a kernel's own file has changed, so the directory's name is a digest of all kernel sources.
If no directory is writable, every worker compiles the kernels again (about ten seconds).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from engine.process.progress import progress

FAST = {"nnan", "nsz", "reassoc", "contract", "arcp"}
"""Sums may be split into vectors; infinities and signed exponents are left alone."""


def _directory() -> str:
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "dragoman" / f"kernels-{digest.hexdigest()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(path) if os.access(path, os.W_OK) else ""


numba.config.CACHE_DIR = _directory()


def kernel(function: Callable[[Any], None]) -> Any:
    """Compile `function(data)`, data being a pointer to int64 arguments, to a C function that any thread may call."""
    signature = numba.types.void(numba.types.voidptr)
    compiled = numba.cfunc(signature, cache=bool(numba.config.CACHE_DIR), fastmath=FAST, error_model="numpy")
    with progress.compiling(function.__name__):
        return compiled(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    return numba.njit(fastmath=FAST, error_model="numpy")(function)


def inlined_with_constants(function: Callable[..., Any]) -> Any:
    """The same of a function some of whose arguments are compile-time constants: it becomes a part of each kernel that calls it."""
    return numba.njit(fastmath=FAST, error_model="numpy", inline="always")(function)


def over_arrays(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a function of NumPy arrays that Python calls."""

    def compile_it(function: Callable[..., None]) -> Callable[..., None]:
        compiled = numba.njit(signature, cache=bool(numba.config.CACHE_DIR), nogil=True)
        with progress.compiling(function.__name__):
            made: Callable[..., None] = compiled(function)
        return made

    return compile_it
