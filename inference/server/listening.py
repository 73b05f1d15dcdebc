"""Listening sockets that several processes of one server share, so that one may end while another serves on.

The first process binds the sockets. A later one asks a running one for them, over a Unix socket in a folder that only this
user can enter, and gets the very same sockets: the kernel's queue of unaccepted connections is shared, so a process that
stops listening refuses nobody. It passes file descriptors and their addresses, and nothing else.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from inference.server.listener import BACKLOG, CannotBind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Address = tuple[str, int]
MAX_MESSAGE_BYTES = 1 << 16
MAX_SOCKETS = 64
TIMEOUT_S = 5.0
PAUSE_S = 1.0
"""Before another connection is accepted after one could not be."""
SUFFIX = ".listeners"


class SharedSockets:
    """The listening sockets of this process, which it also hands to others."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the same for all processes that share their ports; only its owner may enter it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"{os.getpid()}{SUFFIX}"
        self._sockets: dict[Address, socket.socket] = {}
        self._giver: socket.socket | None = None

    def open(self, addresses: Mapping[Address, str]) -> dict[Address, socket.socket]:
        """The listening socket of each address: taken from another process, else bound. `addresses` have the settings that
        give them. Raises CannotBind, and OSError if the folder cannot be used.
        """
        with self._alone():
            taken = self._take()
            for address, setting in addresses.items():
                self._sockets[address] = taken.pop(address) if address in taken else _bind(address, setting)
            for unused in taken.values():
                unused.close()
            self._serve()
        return dict(self._sockets)

    def close(self) -> None:
        """Stop handing out, and close this process's copies; other processes keep theirs."""
        self._path.unlink(missing_ok=True)
        if self._giver is not None:
            self._giver.close()
        for each in self._sockets.values():
            each.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Of processes that start at once, the first binds before the next one asks."""
        with open(self._folder / "listeners.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _take(self) -> dict[Address, socket.socket]:
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, msgspec.MsgspecError), socket.socket(socket.AF_UNIX) as asker:
                asker.settimeout(TIMEOUT_S)
                try:
                    asker.connect(str(path))
                except ConnectionRefusedError:  # its process has ended without removing it
                    path.unlink(missing_ok=True)
                    continue
                found = _receive(asker)
                if found:
                    return found
        return {}

    def _serve(self) -> None:
        self._path.unlink(missing_ok=True)
        self._giver = socket.socket(socket.AF_UNIX)
        self._giver.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._giver.listen(8)
        threading.Thread(target=self._give, args=(self._giver,), name="listeners", daemon=True).start()

    def _give(self, giver: socket.socket) -> None:
        while True:
            try:
                asker, _ = giver.accept()
            except OSError:
                if giver.fileno() < 0:  # closed
                    return
                time.sleep(PAUSE_S)  # no descriptor is left, perhaps
                continue
            with asker, suppress(OSError):
                asker.settimeout(TIMEOUT_S)
                addresses = msgspec.msgpack.encode(list(self._sockets))
                socket.send_fds(asker, [addresses], [each.fileno() for each in self._sockets.values()])


def _receive(asker: socket.socket) -> dict[Address, socket.socket]:
    data, ancillary, _, _ = asker.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(MAX_SOCKETS * array.array("i").itemsize))
    descriptors = array.array("i")
    for level, kind, part in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(part[: len(part) - len(part) % descriptors.itemsize])
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    addresses = msgspec.msgpack.decode(data, type=list[Address])
    return dict(zip(addresses, sockets, strict=True))


def _bind(address: Address, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise CannotBind(*address, setting, error) from error
    bound.setblocking(False)
    return bound
