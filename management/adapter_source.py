"""Opens the files of an adapter where a client or a person says that they lie. It never follows a link out of an allowed
folder, and never opens pickled files or code.

A directory is walked from an allowed folder, part by part, by descriptors: what is checked is what is read, whatever is
moved meanwhile (path_resolution(7), openat(2)).
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from engine.adapters.failures import AdapterCode, AdapterError
from engine.adapters.files import CONFIG, OPEN_FLAGS, WEIGHTS, regular_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CODE = ("model.py", "requirements.txt")
"""Files with which an adapter of DJL Serving would run code."""
PICKLES = tuple(f"adapter_model.{ending}" for ending in ("bin", "pt", "pth", "ckpt", "pkl"))
HUB_BLOB = re.compile(r"\.\./\.\./blobs/(?P<blob>[0-9a-f]{40}|[0-9a-f]{64})")
"""Where a file of the hub's cache links to, from `snapshots/REVISION` (huggingface_hub's cache layout)."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotAllowed(Exception):
    """There is no directory of this name in an allowed folder."""


@dataclass(frozen=True, slots=True)
class SourceDirectory:
    """An open directory; `depth` is the number of folders between it and the allowed one."""

    descriptor: int
    path: Path
    depth: int

    @contextmanager
    def open(self, name: str, max_bytes: int) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """Open a regular file of 1 to `max_bytes` bytes; yields it with its status. Raises AdapterError."""
        with regular_file(self._descriptor(name), name, max_bytes) as opened:
            yield opened

    def check(self) -> None:
        """Refuse code, and weights that are only there as pickled files. Raises AdapterError."""
        for name in CODE:
            if self._has(name):
                raise AdapterError(AdapterCode.CODE, file=name)
        for name in (CONFIG, WEIGHTS):
            if not self._has(name):
                pickled = [each for each in PICKLES if self._has(each)] if name == WEIGHTS else []
                if pickled:
                    raise AdapterError(AdapterCode.PICKLED, file=pickled[0])
                raise AdapterError(AdapterCode.MISSING, file=name)

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _descriptor(self, name: str) -> int:
        try:
            return os.open(name, OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=self.descriptor)
        except FileNotFoundError as error:
            raise AdapterError(AdapterCode.MISSING, file=name) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise AdapterError(AdapterCode.UNREADABLE, file=name, reason=error.strerror or "") from error
        try:
            blob = HUB_BLOB.fullmatch(os.readlink(name, dir_fd=self.descriptor))
        except OSError as error:  # no link any more
            raise AdapterError(AdapterCode.CHANGED_WHILE_READ, file=name) from error
        if blob is None or self.depth < 2:
            raise AdapterError(AdapterCode.LINK, file=name)
        try:
            blobs = os.open("../../blobs", _DIRECTORY, dir_fd=self.descriptor)
            try:
                return os.open(blob["blob"], OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=blobs)
            finally:
                os.close(blobs)
        except OSError as error:
            raise AdapterError(AdapterCode.LINK, file=name) from error


@contextmanager
def open_source(source: str, roots: Sequence[Path] | None) -> Iterator[SourceDirectory]:
    """Open the directory `source`, which must be in one of the folders `roots`; None allows every folder, and links in the
    path to the directory. Raises NotAllowed, which does not tell a missing directory from one elsewhere.
    """
    with ExitStack() as stack:
        try:
            path = Path.cwd() / Path(source).expanduser()
            if ".." in path.parts:
                raise NotAllowed
            base, parts = _below(path, roots)
            descriptor = _opened(stack, base, None)
            for part in parts:
                descriptor = _opened(stack, part, descriptor)
        except (OSError, ValueError, RuntimeError) as error:  # no directory, a link, no text, an unknown user's home
            raise NotAllowed from error
        yield SourceDirectory(descriptor, path, len(parts) if roots is not None else len(path.parts))


def _opened(stack: ExitStack, name: str | Path, parent: int | None) -> int:
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    stack.callback(os.close, descriptor)
    return descriptor


def _below(path: Path, roots: Sequence[Path] | None) -> tuple[Path, tuple[str, ...]]:
    """The folder to begin at, and the parts below it. Raises NotAllowed."""
    if roots is None:
        return path.parent.resolve(strict=True), (path.name,) if path.name else ()
    for root in roots:
        for name in (Path.cwd() / root, root.resolve()):
            if path.is_relative_to(name):
                return root.resolve(), path.relative_to(name).parts
    raise NotAllowed
