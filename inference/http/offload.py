"""Work whose time grows with what a client sent, done beside the event loop.

Python code in a thread shares the interpreter with the loop: the loop gets it back at the next switch, so that what
must stay short is any single call into C (decoding, encoding, sorting, garbage collection), not the whole of the work.
Two threads are the most that compete with the loop.
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
"""Bodies up to this size are worked on where they are: at most a few milliseconds, and no trip to a thread."""
SWITCH_S = 0.001
SLICE = 512
"""Elements of a list that are encoded in one call."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_threads = ThreadPoolExecutor(2, thread_name_prefix="beside")


def prepare_process() -> None:
    """Once the server's own objects are made: they are never looked through for garbage again, and the loop takes the
    interpreter back from a busy thread after a millisecond.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


async def beside(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, computed in a thread; what it raises is raised here."""
    call = partial(contextvars.copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


async def beside_if(heavy: bool, work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, computed in a thread where it is heavy, else here."""
    return await beside(work, *arguments) if heavy else work(*arguments)


def give_back_memory() -> None:
    """Return freed memory to the system, in a thread, after work that took much: glibc keeps what it may want again, and
    a tokenizer takes 350 bytes for each token of a text.
    """
    if _trim is not None:
        _trim(0)


def encoded(values: Iterable[Any], at_once: int = SLICE) -> msgspec.Raw:
    """A list as JSON, encoded in slices of `at_once` elements, so that no call is long, however many there are."""
    slices, part = [], []
    for value in values:
        part.append(value)
        if len(part) == at_once:
            slices.append(msgspec.json.encode(part)[1:-1])
            part = []
    if part:
        slices.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")
