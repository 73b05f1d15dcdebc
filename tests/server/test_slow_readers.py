"""Clients that ask for much and read none of it."""

from __future__ import annotations

import socket

import psutil
import pytest

from tests.live import LiveServer, wait_until

BIG = {"prompt": ["word " * 900] * 8, "max_tokens": 1, "prompt_logprobs": 20, "logprobs": 20}
"""Some ten megabytes of answer, far more than the kernel takes off the server's hands."""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    environment = {"DRAGOMAN_SLOW_CLIENT_TIMEOUT_S": "2"}
    live = LiveServer(tmp_path_factory.mktemp("slow") / "var", environment=environment).start()
    yield live
    assert live.stop() == 0, live.log


def test_a_whole_answer_that_nobody_reads_is_given_up(impatient):
    def connected():
        connections = psutil.Process(impatient.process.pid).net_connections("tcp")
        return any(c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in connections)

    with impatient.raw("/v1/completions", BIG) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        port = connection.getsockname()[1]
        wait_until(connected, 10)
        wait_until(lambda: not connected(), 60, lambda: impatient.log)
    assert impatient.healthy()


def test_a_whole_answer_that_is_read_slowly_is_read_whole(impatient):
    answer = impatient.post("/v1/completions", BIG)
    assert len(answer.content) > 4 << 20
