"""Listening sockets that a process hands to others."""

from __future__ import annotations

import errno
from typing import ClassVar

from inference.server import listening
from inference.server.listening import SharedSockets


def test_sockets_are_handed_out_again_after_a_lack_of_descriptors(monkeypatch):
    class Giver:
        """Cannot accept once, and is closed then."""

        failures: ClassVar = [(errno.EMFILE, 3), (errno.EMFILE, 3), (errno.EBADF, -1)]
        number = 3

        def accept(self):
            code, self.number = self.failures.pop(0)
            raise OSError(code, "no")

        def fileno(self):
            return self.number

    monkeypatch.setattr(listening, "PAUSE_S", 0.0)
    SharedSockets._give(None, Giver())
    assert Giver.failures == []
