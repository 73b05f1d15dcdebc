"""Runs work whose cost grows with the request in threads.

A thread holds the GIL between switches, so single C calls (decoding, encoding, sorting, garbage collection) must be
short; the total time may be long. At most two threads compete with the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
INLINE_BYTES = 1 << 15
"""Bodies up to this size are handled on the event loop: a few milliseconds at most."""
SWITCH_S = 0.001
SLICE = 512
"""Elements of a list that are encoded in one call."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_threads = ThreadPoolExecutor(2, thread_name_prefix="offload")


def prepare_process() -> None:
    """Call once after startup: freezes existing objects for the garbage collector and sets the GIL switch interval to
    1 ms.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread; exceptions propagate."""
    call = partial(contextvars.copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def in_thread_if(heavy: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread if it is heavy, else on the loop."""
    return await in_thread(work, *arguments) if heavy else work(*arguments)


def release_memory() -> None:
    """Return freed memory to the system (malloc_trim) after large work; call it in a thread.

    glibc keeps freed memory, and a tokenizer uses 350 bytes for each token of a text.
    """
    if _trim is not None:
        _trim(0)


def encoded(values: Iterable[Any], at_once: int = SLICE) -> msgspec.Raw:
    """Encode a list as JSON in slices of `at_once` elements, so that each call is short."""
    slices, part = [], []
    for value in values:
        part.append(value)
        if len(part) == at_once:
            slices.append(msgspec.json.encode(part)[1:-1])
            part = []
    if part:
        slices.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")
