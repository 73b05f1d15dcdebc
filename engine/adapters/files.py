"""Reads an adapter's two files: regular files only, within limits, once from front to back, and never memory-mapped.

Truncating a mapped file kills the process that reads the mapping. Imports no torch, because the control plane reads the
same files for their digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from engine.adapters.failures import AdapterCode, AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 256
PART_BYTES = 1 << 18
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Non-blocking, because opening a pipe would wait for a writer."""
LENGTH_BYTES = 8
MAX_DIMENSIONS, MAX_DIMENSION = 8, 1 << 40
"""Of a tensor, and of one of its lengths: the product of more would take seconds."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes per number of the types that weights may have, by their names in safetensors."""


class Tensor(msgspec.Struct, frozen=True):
    """An entry of a safetensors header. `data_offsets` are relative to the header's end."""

    dtype: str
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_DIMENSION)], ...], msgspec.Meta(max_length=MAX_DIMENSIONS)
    ]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter: its configuration object, the bytes of its weights file, and the
    digest of both files.
    """

    config: dict[str, Any]
    weights: memoryview
    digest: str


def never() -> None:
    """A `pause` that returns at once."""


@contextmanager
def open_file(directory: Path, name: str, max_bytes: int) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Open a regular file of 1 to `max_bytes` bytes, unbuffered; yields it with its status. Raises AdapterError."""
    try:
        descriptor = os.open(directory / name, OPEN_FLAGS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterError(AdapterCode.MISSING, file=name) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no path"
        raise AdapterError(AdapterCode.UNREADABLE, file=name, reason=reason) from error
    with regular_file(descriptor, name, max_bytes) as opened:
        yield opened


@contextmanager
def regular_file(descriptor: int, name: str, max_bytes: int) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """The same for a file that is open already; closes it."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise AdapterError(AdapterCode.NOT_A_FILE, file=name)
    with open(descriptor, "rb", buffering=0) as file:
        if not 1 <= status.st_size <= max_bytes:
            raise AdapterError(AdapterCode.SIZE, file=name, limit=max_bytes, size=status.st_size)
        yield file, status


def parts(file: BinaryIO, name: str, size: int) -> Iterator[bytes]:
    """The file's `size` bytes in pieces of at most PART_BYTES; raises AdapterError if the file is shorter or longer."""
    read = 0
    while True:
        try:
            part = file.read(PART_BYTES)
        except OSError as error:
            raise AdapterError(AdapterCode.UNREADABLE, file=name, reason=str(error.strerror)) from error
        read += len(part)
        if read > size or (not part and read < size):
            raise AdapterError(AdapterCode.CHANGED_WHILE_READ, file=name)
        if not part:
            return
        yield part


def read_config(directory: Path) -> bytes:
    """The bytes of the configuration file; raises AdapterError."""
    with open_file(directory, CONFIG, MAX_CONFIG_BYTES) as (file, status):
        return b"".join(parts(file, CONFIG, status.st_size))


def read_files(directory: Path, max_bytes: int, pause: Callable[[], None] = never) -> AdapterFiles:
    """Read both files; raises AdapterError. The weights file may have `max_bytes`; `pause` is called
    after each piece.
    """
    config = read_config(directory)
    with open_file(directory, WEIGHTS, max_bytes) as (file, status):
        weights = memoryview(bytearray(status.st_size))

        def kept() -> Iterator[bytes]:
            filled = 0
            for part in parts(file, WEIGHTS, status.st_size):
                weights[filled : filled + len(part)] = part
                filled += len(part)
                yield part
                pause()

        digest = digest_of(config, kept())
    return AdapterFiles(parse_config(config), weights, digest)


def content_digest(directory: Path, max_bytes: int = 1 << 40) -> str:
    """The digest (`digest_of`) of the adapter in `directory`; raises AdapterError."""
    config = read_config(directory)
    with open_file(directory, WEIGHTS, max_bytes) as (file, status):
        return digest_of(config, parts(file, WEIGHTS, status.st_size))


def digest_of(config: bytes, weights: Iterable[bytes]) -> str:
    """The identity of an adapter: the SHA-256, in hexadecimal, of the SHA-256 digests of its two files. `weights` is
    the second file in parts. The control plane and the workers both compute it, each from the bytes that it has read
    itself.
    """
    own = hashlib.sha256()
    for part in weights:
        own.update(part)
    return hashlib.sha256(hashlib.sha256(config).digest() + own.digest()).hexdigest()


def is_rank(value: Any) -> bool:
    """Whether `value` is an integer between 1 and MAX_RANK."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def parse_config(data: bytes) -> dict[str, Any]:
    """Parse the configuration, a JSON object; raises AdapterError, also if an object has a duplicate name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a name stands twice in one object")
        return value

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        config = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise AdapterError(AdapterCode.TOO_DEEP, file=CONFIG) from error
    except ValueError as error:
        raise AdapterError(AdapterCode.BAD_CONFIG, file=CONFIG, reason=str(error)) from error
    if not isinstance(config, dict):
        raise AdapterError(AdapterCode.NO_OBJECT, file=CONFIG)
    return config


def read_header(weights: memoryview, max_bytes: int) -> tuple[dict[str, Tensor], memoryview]:
    """Parse the header, of at most `max_bytes`, of a file in the safetensors format
    (https://github.com/huggingface/safetensors#format). Returns its tensors and the bytes that their offsets refer to;
    raises AdapterError.
    """
    length = header_length(weights[:LENGTH_BYTES], len(weights), max_bytes)
    data = weights[LENGTH_BYTES + length :]
    return parse_header(weights[LENGTH_BYTES : LENGTH_BYTES + length], len(data)), data


def header_length(first: bytes | memoryview, size: int, max_bytes: int) -> int:
    """The header's bytes, from the file's first eight; `size` is the file's. Raises AdapterError for more than `max_bytes`."""
    length = int.from_bytes(first, "little")
    if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
        raise AdapterError(AdapterCode.HEADER_CUT, file=WEIGHTS)
    if length > max_bytes:
        raise AdapterError(AdapterCode.HEADER_SIZE, file=WEIGHTS, limit=max_bytes, size=length)
    return length


def parse_header(header: bytes | memoryview, data_bytes: int) -> dict[str, Tensor]:
    """The header's tensors, which lie in `data_bytes` bytes without gaps. Raises AdapterError."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(entry, type=Tensor) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(AdapterCode.HEADER_INVALID, file=WEIGHTS) from error
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in ITEM_BYTES:
            raise AdapterError(AdapterCode.WEIGHT_TYPE, tensor=name, dtype=tensor.dtype)
        size = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if min(tensor.shape, default=1) < 1 or tensor.data_offsets != (end, end + size):
            raise AdapterError(AdapterCode.WEIGHT_PLACE, file=WEIGHTS, tensor=name)
        end += size
    if end != data_bytes:
        raise AdapterError(AdapterCode.WEIGHTS_LENGTH, file=WEIGHTS, size=data_bytes, declared=end)
    return tensors
