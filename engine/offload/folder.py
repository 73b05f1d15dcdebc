"""The folder of block files: which blocks it has, in the order of their last use, and what its size may be.

Several workers may share a folder. Each keeps an index of its own and looks again at what the others changed; a file that vanished is
a miss. A file's modification time is its last use, so a restarted worker goes on in the same order. No file's content is read
before its block is needed. One thread writes, one reads, and the engine's thread asks: each holds the lock only in memory.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.offload.block_file import HEADER_BYTES, PART, DamagedFile, read_block, write_block

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARD_NAME, BLOCK_NAME = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{32}")
ABANDONED_S = 600.0
"""The age of a half-written file whose writer must have ended."""
TOUCH_EVERY_S = 60.0
"""Seconds after which the last use of a file is written again."""
RESERVE_BYTES = 1 << 30
"""Bytes of the disk that stay free for others, whatever the limit is: the database lies on the same disk."""
TICK_S = 1.0
"""Changes of a folder closer together may have the same time."""

Key = bytes | str
"""A block of this model by its hash; a file of another model by its path in the folder."""


@dataclass(slots=True)
class _File:
    """A file in the folder; `used_s` is a time of the system's clock."""

    size: int
    used_s: float


@dataclass(slots=True)
class _Shard:
    """A subfolder as it was last read."""

    changed_s: float = 0.0
    read_s: float = 0.0
    keys: set[Key] = field(default_factory=set)


class BlockFolder:
    """Files `<identity>/<first two digits>/<hash>` below `root`. Those of other identities (a model's earlier version) count
    towards the limit, and go when they are the least recently used.
    """

    def __init__(self, root: Path, identity: bytes, limit_bytes: int, block_bytes: int) -> None:
        self.root, self.limit_bytes, self.block_bytes = root, limit_bytes, block_bytes
        self._identity, self._own = identity, identity.hex()
        self._files: OrderedDict[Key, _File] = OrderedDict()
        self._shards: dict[str, _Shard] = {}
        self._touched: list[bytes] = []
        self._lock = threading.Lock()
        self.total_bytes = 0
        self.evictions = 0
        self.damaged = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._files

    def touch(self, digests: Iterable[bytes]) -> None:
        """Note that these blocks were used, as far as they are here."""
        now = time.time()
        with self._lock:
            for digest in digests:
                self._use(digest, now)

    def read(self, digest: bytes) -> memoryview | None:
        """The block's bytes; None if it is not there any more, or damaged, which removes its file."""
        path = self._path(digest)
        try:
            content = read_block(path, self._identity, digest, self.block_bytes)
        except DamagedFile:
            self.damaged += 1
            with suppress(OSError):
                path.unlink()
        except OSError:
            pass
        else:
            self.touch((digest,))
            return content
        self._forget(digest)
        return None

    def write(self, digest: bytes, content: memoryview) -> None:
        """Write a block, and remove others until there is room for it; raises OSError."""
        size = HEADER_BYTES + len(content)
        if digest in self._files or size > self.limit_bytes:
            return
        self._make_room(size)
        try:
            free = shutil.disk_usage(self.root).free
        except FileNotFoundError:  # the folders above may be gone with it
            prepare_folder(self.root)
            free = shutil.disk_usage(self.root).free
        if free < RESERVE_BYTES + size:
            raise OSError(errno.ENOSPC, f"less than {RESERVE_BYTES >> 20} MiB of the disk are free")
        path = self._path(digest)
        try:
            write_block(path, self._identity, digest, content)
        except FileNotFoundError:  # the first block of its subfolder, or somebody removed the folder
            prepare_folder(self.root)
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            write_block(path, self._identity, digest, content)
        self._add(digest, _File(size, time.time()))

    def scan(self) -> None:
        """Take in what others added or removed, and remove what crashed writers left; raises OSError."""
        found: list[tuple[Key, _File]] = []
        seen = set()
        for model in _entries(self.root, BLOCK_NAME):
            for shard in _entries(model.path, SHARD_NAME):
                name = f"{model.name}/{shard.name}"
                seen.add(name)
                with suppress(FileNotFoundError):
                    found += self._read_shard(name, shard)
        for name in self._shards.keys() - seen:
            for key in self._shards.pop(name).keys:
                self._forget(key)
        for key, file in sorted(found, key=lambda entry: entry[1].used_s):
            self._add(key, file)

    def record_uses(self) -> None:
        """Write the last uses of the blocks that were used since the last call."""
        with self._lock:
            touched, self._touched = self._touched, []
        for digest in touched:
            with suppress(OSError):
                os.utime(self._path(digest))

    def _read_shard(self, name: str, shard: os.DirEntry[str]) -> list[tuple[Key, _File]]:
        """The files of a subfolder that are not known yet; forgets those that are gone."""
        known = self._shards.setdefault(name, _Shard())
        changed_s, now = shard.stat(follow_symlinks=False).st_mtime, time.time()
        if changed_s == known.changed_s and known.read_s > changed_s + TICK_S:
            return []
        known.changed_s, known.read_s = changed_s, now
        found, seen = [], set()
        with os.scandir(shard.path) as entries:
            listed = list(entries)
        for entry in listed:
            with suppress(FileNotFoundError):
                if BLOCK_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    key = self._key(name, entry.name)
                    seen.add(key)
                    if key not in self._files:
                        status = entry.stat(follow_symlinks=False)
                        found.append((key, _File(status.st_size, status.st_mtime)))
                elif entry.name.endswith(PART) and now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                    os.unlink(entry.path)
                elif entry.name.endswith(PART):
                    known.read_s = 0.0  # look again
        for key in known.keys - seen:
            self._forget(key)
        return found

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until `size` bytes fit; raises OSError."""
        while self.total_bytes + size > self.limit_bytes:
            with self._lock:
                if not self._files:
                    return
                key, file = next(iter(self._files.items()))
            path = self._path(key)
            with suppress(FileNotFoundError):
                used_s = path.lstat().st_mtime
                if used_s > file.used_s + TICK_S:  # another worker has used it since
                    with self._lock:
                        file.used_s = used_s
                        self._files.move_to_end(key)
                    continue
                path.unlink()
                self.evictions += 1
            self._forget(key)

    def _use(self, digest: bytes, now: float) -> None:
        file = self._files.get(digest)
        if file is None:
            return
        self._files.move_to_end(digest)
        if now - file.used_s > TOUCH_EVERY_S:
            file.used_s = now
            self._touched.append(digest)

    def _add(self, key: Key, file: _File) -> None:
        with self._lock:
            if key not in self._files:
                self._files[key] = file
                self.total_bytes += file.size
                self._shards.setdefault(self._shard(key), _Shard()).keys.add(key)

    def _forget(self, key: Key) -> None:
        with self._lock:
            file = self._files.pop(key, None)
            if file is not None:
                self.total_bytes -= file.size
                shard = self._shards.get(self._shard(key))
                if shard is not None:
                    shard.keys.discard(key)

    def _key(self, shard: str, name: str) -> Key:
        return bytes.fromhex(name) if shard.startswith(self._own) else f"{shard}/{name}"

    def _shard(self, key: Key) -> str:
        return key.rpartition("/")[0] if isinstance(key, str) else f"{self._own}/{key.hex()[:2]}"

    def _path(self, key: Key) -> Path:
        return self.root / (key if isinstance(key, str) else f"{self._own}/{key.hex()[:2]}/{key.hex()}")


def prepare_folder(root: Path) -> None:
    """Make the folder, for its owner alone; raises OSError if it cannot be, or belongs to somebody else."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{root} is no folder of this user")
    if stat.S_IMODE(status.st_mode) != 0o700:
        root.chmod(0o700)


def _entries(folder: str | Path, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """The subfolders with such names; none if the folder is not there."""
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if name.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
