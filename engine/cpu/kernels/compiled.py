"""Compiles kernels, and keeps the result in a cache directory.

Numba checks only whether a kernel's own file has changed, so the directory's name is a digest of all kernel sources, and of the CPU.
If no directory is writable, every worker compiles the kernels again (ten seconds to a minute).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core import config, serialize

from engine.process.progress import progress

logger = logging.getLogger("engine")

FAST = {"nnan", "nsz", "reassoc", "contract", "arcp"}
"""Sums may be split into vectors; infinities and signed exponents are left alone."""


def _directory() -> str:
    cpu = config.CPU_NAME or get_host_cpu_name(), config.CPU_FEATURES or get_host_cpu_features().flatten()
    digest = hashlib.blake2b(repr((numba.__version__, cpu)).encode(), digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "dragoman" / f"kernels-{digest.hexdigest()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return ""
    return str(path) if os.access(path, os.W_OK) else ""


config.CACHE_DIR = _directory()


def kernel(function: Callable[[Any], None]) -> Any:
    """Compile `function(data)`, data being a pointer to int64 arguments, to a C function that any thread may call."""
    signature = numba.types.void(numba.types.voidptr)
    _name_after_constants(function)
    return _compiled(function, lambda cached: numba.cfunc(signature, cache=cached, fastmath=FAST, error_model="numpy"))


def _name_after_constants(function: Callable[..., Any]) -> None:
    """Make the kernel's cache file that of its constants alone. Numba numbers the kernels of one name in a file that it reads and
    writes without a lock: two workers that compile at once could leave one under the number of another.
    """
    constants = tuple(cell.cell_contents for cell in function.__closure__ or ())
    digest = hashlib.blake2b(serialize.dumps(constants), digest_size=8).hexdigest()
    function.__qualname__ = f"{function.__qualname__}_{digest}"


def _compiled(function: Callable[..., Any], decorator: Callable[[bool], Callable[..., Any]]) -> Any:
    """Compile with the cache, or without it if that cannot be used."""
    with progress.compiling(function.__name__):
        if config.CACHE_DIR:
            try:
                return decorator(True)(function)
            except Exception as error:  # a full disk, or any way in which reading a damaged file fails
                logger.warning("no cached kernel %s: %s: %s", function.__name__, type(error).__name__, error)
        return decorator(False)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call, as a part of each of them: else a freshly compiled kernel would run the copy that this
    process compiled beside it, one from the cache its own copy, and their sums may be ordered differently.
    """
    return numba.njit(fastmath=FAST, error_model="numpy", forceinline=True)(function)


def inlined_with_constants(function: Callable[..., Any]) -> Any:
    """The same of a function some of whose arguments are compile-time constants: it becomes a part of each kernel that calls it."""
    return numba.njit(fastmath=FAST, error_model="numpy", inline="always")(function)


def over_arrays(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a function of NumPy arrays that Python calls."""

    def compile_it(function: Callable[..., None]) -> Callable[..., None]:
        made: Callable[..., None] = _compiled(function, lambda cached: numba.njit(signature, cache=cached, nogil=True))
        return made

    return compile_it
