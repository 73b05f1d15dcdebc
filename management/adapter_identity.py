"""Reads the identity of an adapter: the digest of its content and its declared rank. It loads no tensors.

Hashing large files takes seconds, so digests are cached under the file's device, inode, size and times. A cached digest
is wrong only if a file changed without changing any of these; a worker hashes what it reads and refuses such an adapter.
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
    MAX_RANK,
    WEIGHTS,
    digest_of,
    is_rank,
    open_file,
    parse_config,
    parts,
    read_config,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

logger = structlog.get_logger(__name__)

PROGRESS_INTERVAL_S = 5.0
"""Between two log lines while a large file is hashed."""
MAX_CACHED_DIGESTS = 256
SETTLED_S = 2.0
"""The resolution of file times: a file that changed more recently may change again without a new time."""

CacheKey = tuple[bytes, int, int, int, int, int]
"""SHA-256 of the configuration; device, inode, size, mtime and ctime (ns) of the weights' file."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`digest` identifies the content (see `engine.adapters.files`); `rank` is `r` of adapter_config.json."""

    digest: str
    rank: int


_digests: OrderedDict[CacheKey, str] = OrderedDict()
_lock = threading.Lock()


def identify(directory: Path) -> Identity:
    """Read and check both files. Raises AdapterError if one is missing, too large or not a regular file, or if the adapter
    is not a LoRA in PEFT's format.
    """
    data = read_config(directory)
    config = parse_config(data)
    rank, kind = config.get("r"), config.get("peft_type")
    if kind is None or rank is None:
        raise AdapterError(AdapterCode.NO_PEFT, file=CONFIG)
    if kind != "LORA" or not is_rank(rank):
        raise AdapterError(AdapterCode.NO_LORA, limit=MAX_RANK)
    return Identity(_digest(directory, data), rank)


def _digest(directory: Path, config: bytes) -> str:
    with open_file(directory, WEIGHTS, settings.MAX_ADAPTER_BYTES) as (file, status):
        key = _cache_key(config, status)
        with _lock:
            if key in _digests:
                _digests.move_to_end(key)
                return _digests[key]
        settled = max(status.st_mtime, status.st_ctime) + SETTLED_S < time.time()
        digest = digest_of(config, _logged(parts(file, WEIGHTS, status.st_size), directory, status.st_size))
    if settled:
        with _lock:
            _digests[key] = digest
            while len(_digests) > MAX_CACHED_DIGESTS:
                _digests.popitem(last=False)
    return digest


def _logged(read: Iterator[bytes], directory: Path, size: int) -> Iterator[bytes]:
    """The same parts, with a log line about the progress every few seconds."""
    done, logged_at = 0, time.monotonic()
    for part in read:
        yield part
        done += len(part)
        if time.monotonic() - logged_at > PROGRESS_INTERVAL_S:
            logged_at = time.monotonic()
            logger.info("hashing adapter", directory=str(directory), percent=100 * done // size, bytes=size)


def _cache_key(config: bytes, status: os.stat_result) -> CacheKey:
    digest = hashlib.sha256(config).digest()
    return digest, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
