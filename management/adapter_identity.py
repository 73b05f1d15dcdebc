"""What an adapter's files are, without serving them: their digest, which takes a while, and the rank they declare.

A digest is remembered with what the file system says of the files, so registering after checking reads nothing twice. It
may be wrong only for files that changed without a trace there, and a worker, which hashes what it reads, refuses those.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from django.conf import settings

from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import (
    CONFIG,
    MAX_CONFIG_BYTES,
    WEIGHTS,
    combine,
    open_file,
    parse_config,
    parts,
)

if TYPE_CHECKING:
    import os
    from pathlib import Path

logger = structlog.get_logger(__name__)

TELL_EVERY_S = 5.0
MAX_REMEMBERED = 256
SETTLED_S = 2.0
"""Times in a file system are as coarse as that: what changed later than this ago may change again unseen."""
MAX_RANK = 256

Trace = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Identity:
    """`digest` is that of the content (see `engine.adapters.files`)."""

    digest: str
    rank: int


_remembered: OrderedDict[Trace, bytes] = OrderedDict()
_lock = threading.Lock()


def identify(directory: Path) -> Identity:
    """Reads both files; raises AdapterError where they are missing, too large, no regular files or no LoRA of PEFT's."""
    with open_file(directory, CONFIG, MAX_CONFIG_BYTES) as (file, status):
        data = b"".join(parts(file, CONFIG, status.st_size))
    config = parse_config(data)
    rank, kind = config.get("r"), config.get("peft_type")
    if kind is None or rank is None:
        raise AdapterError(AdapterCode.NO_PEFT, file=CONFIG)
    if kind != "LORA" or not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise AdapterError(AdapterCode.NO_LORA, limit=MAX_RANK)
    return Identity(combine(hashlib.sha256(data).digest(), _weights_digest(directory)), rank)


def _weights_digest(directory: Path) -> bytes:
    with open_file(directory, WEIGHTS, settings.MAX_ADAPTER_BYTES) as (file, status):
        trace = _trace(status)
        with _lock:
            if trace in _remembered:
                _remembered.move_to_end(trace)
                return _remembered[trace]
        settled = max(status.st_mtime, status.st_ctime) + SETTLED_S < time.time()
        own, done, told = hashlib.sha256(), 0, time.monotonic()
        for part in parts(file, WEIGHTS, status.st_size):
            own.update(part)
            done += len(part)
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                percent = 100 * done // status.st_size
                logger.info("reading an adapter", directory=str(directory), percent=percent, bytes=status.st_size)
    if settled:
        with _lock:
            _remembered[trace] = own.digest()
            while len(_remembered) > MAX_REMEMBERED:
                _remembered.popitem(last=False)
    return own.digest()


def _trace(status: os.stat_result) -> Trace:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
