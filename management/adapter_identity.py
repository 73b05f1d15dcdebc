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

PROGRESS_INTERVAL_S = 5.0
"""Between two log lines while a large file is hashed."""
MAX_CACHED_DIGESTS = 256
SETTLED_S = 2.0
"""The resolution of file times: a file that changed more recently may change again without a new time."""
MAX_RANK = 256

CacheKey = tuple[int, int, int, int, int]
"""Device, inode, size, mtime and ctime (ns) of a file."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`digest` identifies the content (see `engine.adapters.files`); `rank` is `r` of adapter_config.json."""

    digest: str
    rank: int


_digests: OrderedDict[CacheKey, bytes] = OrderedDict()
_lock = threading.Lock()


def identify(directory: Path) -> Identity:
    """Read and check both files. Raises AdapterError if one is missing, too large or not a regular file, or if the adapter
    is not a LoRA in PEFT's format.
    """
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
        key = _cache_key(status)
        with _lock:
            if key in _digests:
                _digests.move_to_end(key)
                return _digests[key]
        settled = max(status.st_mtime, status.st_ctime) + SETTLED_S < time.time()
        digest, done, logged_at = hashlib.sha256(), 0, time.monotonic()
        for part in parts(file, WEIGHTS, status.st_size):
            digest.update(part)
            done += len(part)
            if time.monotonic() - logged_at > PROGRESS_INTERVAL_S:
                logged_at = time.monotonic()
                percent = 100 * done // status.st_size
                logger.info("hashing adapter", directory=str(directory), percent=percent, bytes=status.st_size)
    if settled:
        with _lock:
            _digests[key] = digest.digest()
            while len(_digests) > MAX_CACHED_DIGESTS:
                _digests.popitem(last=False)
    return digest.digest()


def _cache_key(status: os.stat_result) -> CacheKey:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
