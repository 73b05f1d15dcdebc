"""The format of one block's file: a header and the block's bytes. It knows no folder and no limit.

A file is written under another name and renamed, so that a reader finds a whole file or none; it is not synchronised, because
the checksum refuses what a crash of the machine left of it. It is never memory-mapped: truncating a mapped file kills its reader.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from engine import faults

if TYPE_CHECKING:
    from pathlib import Path

MAGIC, VERSION = b"DRAGOKV\n", 1
_HEADER = struct.Struct("<8sIIQ16s16s")
"""Magic, version, checksum, the block's bytes, identity of model and layout, hash of the block's tokens and all before them."""
HEADER_BYTES = _HEADER.size
PART = ".part"
"""The suffix of a file that is being written."""
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DamagedFile(Exception):
    """The file is not this block: truncated, changed, of another version, or of another model, layout or prefix."""


def write_block(path: Path, identity: bytes, digest: bytes, content: memoryview) -> None:
    """Write the file at once or not at all; raises OSError."""
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}{PART}")  # other workers may write the same block
    descriptor = os.open(part, CREATE_FLAGS, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for piece in (_header(identity, digest, content), content):
                written = 0
                while written < len(piece):
                    if faults.armed:
                        faults.hit("offload.write")
                    written += file.write(piece[written:]) or 0
        part.rename(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def read_block(path: Path, identity: bytes, digest: bytes, size: int) -> memoryview:
    """The block's `size` bytes. Raises DamagedFile, or OSError if the file cannot be read."""
    with open(os.open(path, OPEN_FLAGS), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != HEADER_BYTES + size:
            raise DamagedFile(f"{status.st_size} bytes instead of {HEADER_BYTES + size}")
        data = memoryview(bytearray(HEADER_BYTES + size))
        filled = 0
        while filled < len(data):
            if faults.armed:
                faults.hit("offload.read")
            count = file.readinto(data[filled:])
            if not count:
                raise DamagedFile(f"it ended after {filled} bytes")
            filled += count
    content = data[HEADER_BYTES:]
    if data[:HEADER_BYTES] != _header(identity, digest, content):
        raise DamagedFile("the header is another block's, or the checksum differs")
    return content


def _header(identity: bytes, digest: bytes, content: memoryview) -> bytes:
    """The header with the checksum of itself and the content."""
    fields = (len(content), identity, digest)
    checksum = zlib.crc32(content, zlib.crc32(_HEADER.pack(MAGIC, VERSION, 0, *fields)))
    return _HEADER.pack(MAGIC, VERSION, checksum, *fields)
