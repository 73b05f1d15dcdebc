"""MindIE's planes of the server that a test's mark chooses, and comparison with golden bytes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import httpx
import pytest

from tests.in_process import InProcessServer
from tests.live import LiveServer

PROMPT = "Question: What is the capital of Spain?\nAnswer:"
LINE = " The capital of Spain is Madrid."


@dataclass
class Mindie:
    server: LiveServer | InProcessServer

    def post(self, path: str, body: object, management: bool = False, **options: object) -> httpx.Response:
        base = self.server.management_url if management else self.server.mindie_url
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.server.client.post(base + path, content=content, **options)

    def get(self, path: str, **options: object) -> httpx.Response:
        return self.server.client.get(self.server.mindie_url + path, **options)

    def manage(self, path: str, **options: object) -> httpx.Response:
        return self.server.client.get(self.server.management_url + path, **options)

    def refused(self, path: str, body: object, error: str, status: int = 422, management: bool = False) -> None:
        """The answer is MindIE's one error body with this text."""
        answer = self.post(path, body, management)
        kinds = {
            422: "Input Validation Error",
            424: "Generation Error",
            404: "NotFoundError",
            503: "Service Unavailable",
        }
        expected = {"error": error, "error_type": kinds[status]}
        assert (answer.status_code, answer.json()) == (status, expected), answer.text


@pytest.fixture
def mindie(server) -> Mindie:
    return Mindie(server)


def golden(actual: bytes | str, pattern: str) -> None:
    """Byte for byte, but for `<n>` (a number), `<ids>` (token ids of one step), `<text>` (what stands in quotes),
    `<f>` (any JSON number) and `<id>` (an internal id)."""
    text = actual.decode() if isinstance(actual, bytes) else actual
    expression = re.escape(pattern)
    for mark, matched in (
        ("<n>", r"\d+"),
        ("<f>", r"-?[\d.e+-]+"),
        ("<ids>", r"\[\d+(?:,\d+)*\]"),
        ("<text>", r'[^"]*'),
        ("<id>", r"endpoint_common_\d+"),
    ):
        expression = expression.replace(re.escape(mark), matched)
    assert re.fullmatch(expression, text), f"{text!r}\nis not\n{pattern!r}"


def chunks(mindie: Mindie, path: str, body: object) -> list[bytes]:
    """The HTTP chunks of a stream, as the server cut them."""
    import socket

    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", mindie.server.mindie_port), timeout=60) as connection:
        connection.sendall(head + content)
        received = b""
        while data := connection.recv(65536):
            received += data
    head_, _, rest = received.partition(b"\r\n\r\n")
    assert b" 200 " in head_.split(b"\r\n")[0], head_
    found = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        found.append(rest[:length])
        rest = rest[length + 2 :]
    return found


def several_chunks(mindie: Mindie, path: str, body: object) -> list[bytes]:
    """`chunks` of a stream that came in more than one: a busy machine may send a short text at once, and is asked again."""
    for _ in range(50):
        if len(found := chunks(mindie, path, body)) > 1:
            return found
    raise AssertionError(f"every stream of {path} came in one chunk")
