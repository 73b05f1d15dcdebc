"""Bytes to a port and what comes back: for requests that no HTTP client would send."""

from __future__ import annotations

import contextlib
import socket
import time

from tests.live import START_TIMEOUT_S, LiveServer
from tests.waiting import wait_until

TIMEOUT_S = 30.0


def listening(live: LiveServer) -> LiveServer:
    """Start a server and return when it answers requests, whether or not its model is loaded: for what never reaches a model."""
    live.start(wait=False)

    def answers() -> bool:
        assert live.process is not None
        assert live.process.poll() is None, live.log
        with contextlib.suppress(OSError):
            return bool(
                statuses(exchange(live.front_port, b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
            )
        return False

    wait_until(answers, START_TIMEOUT_S, lambda: live.log)
    return live


def exchange(port: int, *parts: bytes, timeout_s: float = TIMEOUT_S, finish: bool = False) -> bytes:
    """Everything that comes until the server closes; `finish`: say that nothing more is sent, so that it does."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            if finish:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                received += data
        return received


def statuses(received: bytes) -> list[int]:
    """The status of every answer that was received."""
    return [int(piece[:3]) for piece in received.split(b"HTTP/1.1 ")[1:]]


def timed(port: int, *parts: bytes) -> tuple[bytes, float]:
    """The same, with the seconds that it took."""
    begin = time.monotonic()
    received = exchange(port, *parts)
    return received, time.monotonic() - begin
