"""The store of adapters' files, addressed by content: `DIRECTORY/DIGEST/` holds the two files of an adapter.

Registration copies the files into the store, so what happens to their source later changes nothing. A digest's folder
appears whole or not at all, and is never changed. It loads no tensors.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import structlog
from django.conf import settings

from engine import faults
from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import (
    CONFIG,
    LENGTH_BYTES,
    MAX_CONFIG_BYTES,
    MAX_RANK,
    WEIGHTS,
    content_digest,
    digest_of,
    header_length,
    is_rank,
    parse_config,
    parse_header,
    parts,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from management.adapter_source import SourceDirectory

logger = structlog.get_logger(__name__)

MAX_HEADER_BYTES = 2 << 20
"""Enough for thousands of layers. Parsing holds the interpreter, so the server's event loop waits for it: 2 MiB take less than
0.1 s. For most models a worker allows less."""
PROGRESS_INTERVAL_S = 5.0
"""Between two log lines while a large file is copied."""
GRACE_S = 3600.0
"""Seconds that files which nothing refers to are kept: a registration under way refers to them in the end."""
INCOMING = ".incoming-"
ABANDONED_S = 10.0
"""Seconds in which a new folder is surely locked by its process."""


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """`digest` identifies the content (see `engine.adapters.files`); `rank` is `r` of adapter_config.json."""

    digest: str
    rank: int
    directory: Path


def store_adapter(source: SourceDirectory) -> StoredAdapter:
    """Check both files and copy them into the store; nothing is left of a refused adapter. Raises AdapterError; OSError if the
    store cannot be written.
    """
    source.check()
    with source.open(CONFIG, MAX_CONFIG_BYTES) as (file, status):
        config = b"".join(parts(file, CONFIG, status.st_size))
    rank = _rank(config)
    with source.open(WEIGHTS, settings.MAX_ADAPTER_BYTES) as (file, status), _incoming() as folder:
        _check_header(file, status.st_size)
        copied = _copied(folder / WEIGHTS, _logged(parts(file, WEIGHTS, status.st_size), source.path, status.st_size))
        digest = digest_of(config, copied)
        with (folder / CONFIG).open("xb") as out:
            out.write(config)
            os.fsync(out.fileno())
        return StoredAdapter(digest, rank, _placed(folder, digest))


def release(directories: Iterable[str]) -> None:
    """The content in these directories is not needed any more: it may leave after GRACE_S, in which running requests end."""
    for directory in directories:
        with suppress(FileNotFoundError):
            if Path(directory).parent == settings.ADAPTER_STORE:
                os.utime(directory)


def sweep_store(known: Collection[str]) -> None:
    """Remove the content of unknown digests once it is older than GRACE_S, and what interrupted registrations left."""
    store: Path = settings.ADAPTER_STORE
    if not store.is_dir():
        return
    for folder in store.iterdir():
        with suppress(FileNotFoundError):  # another process was quicker
            age_s = time.time() - folder.stat().st_mtime
            abandoned = folder.name.startswith(INCOMING) and age_s > ABANDONED_S and _is_unlocked(folder)
            if abandoned or (folder.name not in known and age_s > GRACE_S):
                logger.info("unused adapter files removed", folder=folder.name)
                shutil.rmtree(folder)


def _is_unlocked(folder: Path) -> bool:
    """Whether no process holds the lock of a registration that is under way; a lock ends with its process (flock(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _rank(config: bytes) -> int:
    value = parse_config(config)
    rank, kind = value.get("r"), value.get("peft_type")
    if kind is None or rank is None:
        raise AdapterError(AdapterCode.NO_PEFT, file=CONFIG)
    if kind == "LORA" and type(rank) is int and not is_rank(rank):
        raise AdapterError(AdapterCode.RANK, tensor=CONFIG, limit=MAX_RANK, rank=rank)
    if kind != "LORA" or not is_rank(rank):
        raise AdapterError(AdapterCode.NO_LORA, limit=MAX_RANK)
    return int(rank)


def _check_header(file: BinaryIO, size: int) -> None:
    """Check the header of the weights before they are copied; the file is at its beginning again afterwards."""
    length = header_length(file.read(LENGTH_BYTES), size, MAX_HEADER_BYTES)
    header = file.read(length)
    if len(header) < length:
        raise AdapterError(AdapterCode.CHANGED_WHILE_READ, file=WEIGHTS)
    parse_header(header, size - LENGTH_BYTES - length)
    file.seek(0)


@contextmanager
def _incoming() -> Iterator[Path]:
    """A new folder in the store, removed unless it is moved to its place."""
    store: Path = settings.ADAPTER_STORE
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=INCOMING, dir=store))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)  # only moved folders are missing


def _copied(target: Path, content: Iterator[bytes]) -> Iterator[bytes]:
    """The same parts, written to a new file that is on the disk when they end."""
    with target.open("xb") as out:
        for part in content:
            if faults.armed:
                faults.hit("adapter.copy")
            out.write(part)
            yield part
        out.flush()
        os.fsync(out.fileno())


def _placed(folder: Path, digest: str) -> Path:
    """Move the folder to its place. The same content that is there already stays; damaged content is replaced."""
    place: Path = settings.ADAPTER_STORE / digest
    if place.exists() and not _is_intact(place, digest):
        logger.warning("damaged adapter files replaced", folder=digest)
        shutil.rmtree(place)
    if not place.exists():
        try:
            folder.rename(place)
        except OSError:  # another process was quicker
            if not place.exists():
                raise
        _sync(place.parent)
    os.utime(place)  # a sweep that is under way leaves it
    return place


def _is_intact(place: Path, digest: str) -> bool:
    try:
        return content_digest(place) == digest
    except AdapterError:
        return False


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _logged(read: Iterator[bytes], directory: Path, size: int) -> Iterator[bytes]:
    """The same parts, with a log line about the progress every few seconds."""
    done, logged_at = 0, time.monotonic()
    for part in read:
        yield part
        done += len(part)
        if time.monotonic() - logged_at > PROGRESS_INTERVAL_S:
            logged_at = time.monotonic()
            logger.info("storing adapter", directory=str(directory), percent=100 * done // size, bytes=size)
