"""Users whom no server should have to suffer: they hang up in every phase, or ask for much and read nothing."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import gevent

from loadtests.current import Order
from loadtests.settings import API_KEY, MODEL
from loadtests.users.base import Answer, DialectUser, Question

DEAF_S = 3.0
LINGER_0 = struct.pack("ii", 1, 0)
"""A close that resets the connection."""


class _RawUser(DialectUser):
    """One request on a socket of its own."""

    abstract = True
    exact = False

    def body(self, question: Question) -> dict[str, Any]:
        """What is sent."""
        return {"model": MODEL, "prompt": question.prompt, "max_tokens": question.output_tokens, "ignore_eos": True,
                "stream": self._rng.random() < 0.7}  # fmt: skip

    def call(self, order: Order, question: Question, answer: Answer) -> None:
        parts = urlsplit(order.addresses.front)
        content = json.dumps(self.body(question)).encode()
        key = f"authorization: Bearer {API_KEY}\r\n" if API_KEY else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n{key}content-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        try:
            with contextlib.closing(
                _connected(parts.hostname or "", parts.port, parts.scheme == "https")
            ) as connection:
                self.behave(connection, head.encode() + content)
        except OSError as error:
            answer.lost = f"{type(error).__name__}: {error}"
        # There is no answer to judge. What the server has left of it is judged at the end of the run.
        answer.ended, answer.tokens = True, 1

    def behave(self, connection: socket.socket, request: bytes) -> None:
        """Do it; OSErrors are the server's fault."""
        raise NotImplementedError


class HangUpUser(_RawUser):
    """Resets the connection while it sends, while it waits, or in the middle of a stream."""

    def behave(self, connection: socket.socket, request: bytes) -> None:
        if self._rng.random() < 0.1:
            connection.sendall(request[: self._rng.randrange(1, len(request))])
        else:
            connection.sendall(request)
            until = time.monotonic() + self._rng.expovariate(4)
            with contextlib.suppress(TimeoutError):
                while (left := until - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(4096):
                        break
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)


class NonReaderUser(_RawUser):
    """Asks for much and reads nothing for a while."""

    def body(self, question: Question) -> dict[str, Any]:
        return {**super().body(question), "stream": True, "max_tokens": 400, "n": 4, "logprobs": 5}

    def behave(self, connection: socket.socket, request: bytes) -> None:
        connection.sendall(request)
        gevent.sleep(DEAF_S * random.uniform(0.5, 1.5))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)


def _connected(host: str, port: int | None, tls: bool) -> socket.socket:
    connection = socket.create_connection((host, port or (443 if tls else 80)), timeout=30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if not tls:
        return connection
    return ssl._create_unverified_context().wrap_socket(connection, server_hostname=host)
