"""Clients that ask for much and read none of it, in plain text and over TLS."""

from __future__ import annotations

import socket

import psutil
import pytest

from tests.certificates import Authority, client_context
from tests.live import LiveServer, wait_until

BIG = {"prompt": ["word " * 900] * 8, "max_tokens": 1, "prompt_logprobs": 20, "logprobs": 20}
"""Some ten megabytes of answer, far more than the kernel takes off the server's hands."""
STREAM = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "n": 8, "temperature": 1.0, "logprobs": 20,
          "stream": True, "return_token_ids": True}  # fmt: skip


MOST_GROWN_BYTES = 80 << 20


@pytest.fixture(scope="module", params=["plain", "tls"])
def impatient(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    live = LiveServer(folder / "var", environment={"DRAGOMAN_SLOW_CLIENT_TIMEOUT_S": "2"})
    if request.param == "tls":
        authority = Authority()
        certificate, key = authority.issue("server").write(folder, "server")
        live.environment |= {"DRAGOMAN_TLS_CERTIFICATE": str(certificate), "DRAGOMAN_TLS_KEY": str(key)}
        live.verify = client_context(authority, folder)
    live.start()
    yield live
    assert live.stop() == 0, live.log


def connected(live, port):
    """Whether the server holds a connection with a client on this port."""
    connections = psutil.Process(live.process.pid).net_connections("tcp")
    return any(c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in connections)


@pytest.mark.parametrize("body", [BIG, STREAM], ids=["whole", "stream"])
def test_an_answer_that_nobody_reads_is_given_up(impatient, body):
    """What malloc keeps of one it keeps once; what leaks, leaks with each."""
    grown = [grown_by(impatient, body)]
    while grown[-1] > MOST_GROWN_BYTES and len(grown) < 4:
        grown.append(grown_by(impatient, body))
    assert grown[-1] <= MOST_GROWN_BYTES, grown
    assert impatient.healthy()


@pytest.mark.parametrize("read", [0, 1 << 19])
def test_the_rest_of_a_last_answer_that_nobody_reads_is_given_up(impatient, read):
    """However little it is: no further request's deadline ends the connection."""
    with impatient.connection() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        connection.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        port = connection.getsockname()[1]
        while read > 0:
            read -= len(connection.recv(1 << 14))
        wait_until(lambda: not connected(impatient, port), 120, lambda: impatient.log)


def grown_by(live, body) -> int:
    """Bytes by which the server has grown with an answer that nobody reads, after it has been given up."""
    process = psutil.Process(live.process.pid)
    before = process.memory_info().rss
    with live.raw("/v1/completions", body) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        port = connection.getsockname()[1]
        wait_until(lambda: connected(live, port))
        wait_until(lambda: not connected(live, port), 120, lambda: live.log)
    live.wait_idle()
    return process.memory_info().rss - before


def test_a_whole_answer_that_is_read_slowly_is_read_whole(impatient):
    answer = impatient.post("/v1/completions", BIG)
    assert len(answer.content) > 4 << 20


@pytest.mark.parametrize("length", ["content-length: 10737418240", "transfer-encoding: chunked"])
def test_a_refusal_comes_before_the_body(impatient, length):
    with impatient.connection() as connection:
        connection.sendall(f"POST /v1/load_no_adapter HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 404 ")
    assert received.count(b"HTTP/1.1") == 1
