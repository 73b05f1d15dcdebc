"""`key_file.json`: three keys, of which two expire and can be replaced, shared by all processes that serve from one folder.

The file decides: each process reads it again when it has changed, so a key that one of them replaces is replaced for all.
The first process writes it, and the last one to end removes it. Locks tell who is alive, so a file that a killed
server left is never taken for a running one's.
"""

from __future__ import annotations

import atexit
import fcntl
import hmac
import json
import os
import re
import secrets
import stat
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FILE = "key_file.json"
LOCK, USERS = ".key_file.lock", ".key_file.users"
"""Locked by who changes the keys, and by every process that uses them."""
KINDS = ("management", "inference", "API")
EXPIRING = ("management", "inference")
EXPIRES = "expiration time"
KEY_BYTES = 24
MAX_BYTES = 1 << 16
_BEARER = re.compile(r"Bearer\s+(\S+)")
logger = structlog.get_logger(__name__)


class KeyFile:
    """The keys as the file has them, which only its owner can read or write; without the file, as they were."""

    def __init__(self, folder: Path, expiration_s: float, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder.absolute()
        self._path = self._folder / FILE
        self._expiration_s, self._clock = expiration_s, clock
        self._keys, self._expires = self._new()
        self._seen: tuple[int, ...] = ()
        """What tells the file that was read last from others."""
        self._users: IO[bytes] | None = None

    def create(self) -> None:
        """Share the keys of the processes that serve from this folder already, or write new ones; the last process to end
        removes the file. Raises OSError.
        """
        with self._alone():
            users = _opened(self._folder / USERS)
            try:
                first = _locked(users)
                if first or not self._read():
                    self._write(*self._new())
                fcntl.flock(users, fcntl.LOCK_SH)
            except BaseException:
                users.close()
                raise
            self._users = users
        atexit.register(self.remove)
        logger.info("token authorization on", file=str(self._path), shared=not first)

    def remove(self) -> None:
        """Use the keys no more; remove the file unless other processes use it."""
        if self._users is None:
            return
        atexit.unregister(self.remove)
        try:
            with self._alone():
                if _locked(self._users):
                    for name in (FILE, USERS, LOCK):
                        (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("TorchServe's keys cannot be removed", file=str(self._path), reason=error.strerror)
        finally:
            self._users.close()
            self._users = None

    def replace(self, kind: str) -> dict[str, str]:
        """A new key of a kind, management or inference, with its time of expiry. Raises OSError."""
        with self._alone():
            self._read()  # another process may have replaced the other kind
            keys = {**self._keys, kind: secrets.token_urlsafe(KEY_BYTES)}
            expires = {**self._expires, kind: self._clock() + self._expiration_s}
            self._write(keys, expires)
            return _entry(kind, keys, expires)

    def opens(self, kind: str, header: str | None) -> bool:
        """Whether the Authorization header has the key of this kind, which has not expired."""
        self._follow()
        found = _BEARER.fullmatch(header or "")
        given = found[1] if found else ""
        same = hmac.compare_digest(given.encode("utf-8", "replace"), self._keys[kind].encode())
        return same and self._clock() < self._expires.get(kind, float("inf"))

    def _new(self) -> tuple[dict[str, str], dict[str, float]]:
        keys = {kind: secrets.token_urlsafe(KEY_BYTES) for kind in KINDS}
        return keys, dict.fromkeys(EXPIRING, self._clock() + self._expiration_s)

    def _follow(self) -> None:
        """Read the file again if it has changed."""
        try:
            found = _identity(os.lstat(self._path))
        except OSError:  # somebody removed it; the keys stay
            return
        if found != self._seen:
            self._seen = found
            self._read()

    def _read(self) -> bool:
        """Take the file's keys; False, and the keys as they were, if there is none that can be used."""
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                found = os.fstat(file.fileno())
                self._seen = _identity(found)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                    raise ValueError("others may read or write it")
                keys, expires = _parsed(file.read(MAX_BYTES))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            # Not the error's text, which may repeat the file's.
            logger.warning("key file cannot be used", file=str(self._path), reason=type(error).__name__)
            return False
        self._keys, self._expires = keys, expires
        return True

    def _write(self, keys: dict[str, str], expires: dict[str, float]) -> None:
        text = json.dumps({kind: _entry(kind, keys, expires) for kind in KINDS}, indent=2)
        new = self._path.with_name(f"{FILE}.{os.getpid()}")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        new.replace(self._path)
        self._keys, self._expires = keys, expires

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process or thread changes the keys meanwhile. Raises OSError."""
        path = self._folder / LOCK
        while True:
            with _opened(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_at(lock, path):  # the last process has removed it
                    continue
                yield
                return


def _entry(kind: str, keys: dict[str, str], expires: dict[str, float]) -> dict[str, str]:
    entry = {"key": keys[kind]}
    if kind in expires:
        moment = datetime.fromtimestamp(expires[kind], UTC)
        entry[EXPIRES] = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return entry


def _parsed(text: bytes) -> tuple[dict[str, str], dict[str, float]]:
    """Keys and times of expiry by kind. Raises ValueError, KeyError or TypeError."""
    found: dict[str, Any] = json.loads(text)
    keys = {kind: found[kind]["key"] for kind in KINDS}
    if not all(isinstance(key, str) and len(key) >= KEY_BYTES for key in keys.values()):
        raise ValueError("a key is too short")
    return keys, {kind: datetime.fromisoformat(found[kind][EXPIRES]).timestamp() for kind in EXPIRING}


def _identity(found: os.stat_result) -> tuple[int, ...]:
    # Not the time of the change of its entry, which a renaming sets.
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _opened(path: Path) -> IO[bytes]:
    """The file, made if it is not there; nobody else may open it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "rb")


def _locked(file: IO[bytes]) -> bool:
    """Lock the file for this user alone; False if others have it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
