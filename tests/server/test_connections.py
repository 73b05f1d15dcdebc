"""What the server does with clients that leave, stall, flood or drip."""

from __future__ import annotations

import contextlib
import gzip
import socket
import time

import psutil
import pytest

from tests import calls
from tests.live import LiveServer, wait_until

LONG = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


def status_line(connection: socket.socket) -> str:
    return connection.recv(65536).split(b"\r\n", 1)[0].decode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_hanging_up_during_decode_frees_everything(server, stream, path):
    body = {**LONG, "stream": stream}
    if path == "/generate":
        path = "/generate_stream" if stream else "/generate"
        hot = {"do_sample": True, "temperature": 100.0, "seed": 1}  # a story would end before anyone hangs up
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 1000, **hot}}
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    with server.raw(path, body):
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    wait_until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == before + 1)
    server.wait_idle()


def test_hanging_up_while_queued_and_in_prefill(server):
    long_prompt = {**LONG, "prompt": "word " * 1500, "max_tokens": 500}
    for _ in range(5):
        connections = []
        for _ in range(12):
            context = server.raw("/v1/completions", long_prompt)
            connections.append(context)
            context.__enter__()
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0)  # and the others wait or are prefilled
        for context in connections:
            context.__exit__(None, None, None)
    server.wait_idle()
    assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200


def test_a_client_that_does_not_read_costs_no_memory_and_stops_nobody(server):
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    many = {**LONG, "n": 8, "temperature": 1.0, "logprobs": 20, "stream": True, "return_token_ids": True}
    with server.raw("/v1/completions", many) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 8)
        start = time.monotonic()
        assert server.post("/v1/completions", {**LONG, "max_tokens": 8}).status_code == 200
        assert time.monotonic() - start < 60
    server.wait_idle()
    assert process.memory_info().rss - before < 60 << 20


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_bodies_of_64_mib_are_refused_and_not_kept(server, chunked, path):
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    block = b"x" * (1 << 20)
    with socket.create_connection(("127.0.0.1", server.front_port), timeout=60) as connection:
        length = "transfer-encoding: chunked" if chunked else f"content-length: {64 << 20}"
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
        for _ in range(64):
            connection.sendall(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
        if chunked:
            connection.sendall(b"0\r\n\r\n")
        answer = connection.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 413")
    assert ('"error":{' if path.startswith("/v1") else '"error_type":') in answer
    assert process.memory_info().rss - before < 20 << 20


def test_headers_must_not_drip(tmp_path):
    from tests.live import LiveServer  # its own server, with short deadlines

    live = LiveServer(tmp_path / "var", environment={"DRAGOMAN_HEADERS_TIMEOUT_S": "1", "DRAGOMAN_BODY_TIMEOUT_S": "1"})
    live.start()
    try:
        for first in (b"", b"GET /hea", b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", live.front_port), timeout=60) as connection:
                connection.sendall(first)
                start = time.monotonic()
                closed = b""
                while time.monotonic() - start < 60:
                    try:
                        connection.sendall(b"x")
                        connection.settimeout(0.2)
                        closed = connection.recv(4096)
                        break
                    except TimeoutError:
                        continue
                    except (ConnectionError, BrokenPipeError):
                        closed = b"reset"
                        break
                assert closed.startswith((b"HTTP/1.1 408", b"reset")), (first, closed)
        # a second request on a kept connection has the same deadline
        with socket.create_connection(("127.0.0.1", live.front_port), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert "200" in status_line(connection)
            connection.sendall(b"GET /hea")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    finally:
        assert live.stop() == 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx-folded: 1\r\n 2\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: +2\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(server, request_bytes):
    with socket.create_connection(("127.0.0.1", server.front_port), timeout=60) as connection:
        connection.sendall(request_bytes)
        assert "400" in status_line(connection)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", "414"),
        (b"GET /" + b"a" * 200_000, "414"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 20_000 + b"\r\n\r\n", "431"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 200_000, "431"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n" + (b"x: " + b"a" * 5_000 + b"\r\n") * 4 + b"\r\n", "431"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: 1\r\n" * 600 + b"\r\n", "431"),
    ],
    ids=["a path", "a path without end", "a header", "a header without end", "headers together", "many headers"],
)
def test_heads_that_are_too_long_are_answered(server, head, status):
    """Also on a connection that has answered a request before."""
    for first in (b"", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.front_port), timeout=60) as connection:
            if first:
                connection.sendall(first)
                assert "200" in status_line(connection)
            connection.sendall(head)
            assert status in status_line(connection)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v2/models/demo/generate"])
def test_an_encoded_body_is_refused_as_such(server, path):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.post(path, gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding 'gzip'" in answer.text


def test_long_texts_do_not_hold_up_others(server):
    import threading

    body = {"inputs": "a b " * 450_000}
    threads = [threading.Thread(target=server.post, args=(path, body)) for path in ("/generate", "/tokenize")]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        assert server.get("/ping").status_code == 200
        answered += 1
    assert answered > 5, "a server that is held up answers when the texts are done"


def test_websockets_are_turned_away_quietly(server):
    before = server.log.count("Traceback")
    head = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "eA=="}
    assert server.get("/health", headers=head).status_code in (400, 403)
    assert server.log.count("Traceback") == before


def test_a_root_path_header_moves_nothing(server):
    assert server.get("/public/health", headers={"daphne-root-path": "/public"}).status_code == 404


def test_planes_are_apart(server):

    assert calls.get(f"{server.admin_url}/v1/models").status_code == 404
    assert server.get("/admin/").status_code == 404


def test_errors_carry_the_request_id(server):
    for path in ("/v1/models/nobody", "/v1/models", "/v1/nothing"):
        assert server.get(path, headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    assert "x-request-id" not in server.get("/health").headers


def test_request_ids_are_echoed_or_made(server):
    ask = {"prompt": "Hi", "max_tokens": 1}
    answer = server.post("/v1/completions", ask, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    made = server.post("/v1/completions", ask, headers={"x-request-id": "x" * 500}).headers["x-request-id"]
    assert len(made) == 32


def test_documentation_needs_no_other_site(server):
    page = server.get("/docs").text
    assert "http" not in page.replace("http-equiv", "")
    for asset in ("swagger-ui.css", "swagger-ui-bundle.js"):
        assert server.get(f"/docs/{asset}").status_code == 200
    assert server.get("/docs/../settings.py").status_code == 404
    paths = server.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream", "/tokenize", "/metrics"):
        assert path in paths


def test_metrics_have_both_families(server):
    server.post("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 2}})
    server.post("/generate", {"inputs": "Hi", "parameters": {"top_k": 0}})
    text = server.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket", "vllm:generation_tokens_total",
                 "tgi_request_count ", "tgi_request_success ", 'tgi_request_failure{err="validation"}', "tgi_queue_size",
                 "tgi_request_duration_bucket", 'tgi_batch_inference_count{method="decode"}'):  # fmt: skip
        assert name in text


def test_a_flood_of_one_plane_does_not_shut_the_others(tmp_path):
    most = 60
    live = LiveServer(tmp_path / "var", environment={"DRAGOMAN_MAX_CONNECTIONS": str(most)}).start()
    front = ("127.0.0.1", live.front_port)

    def refused() -> bool:
        """Whether one more connection is closed at once."""
        with socket.create_connection(front, timeout=60) as late, contextlib.suppress(ConnectionError):
            late.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return late.recv(1) == b""
        return True

    try:
        with contextlib.ExitStack() as stack:
            for _ in range(most):
                stack.enter_context(socket.create_connection(front, timeout=60))
            wait_until(refused)
            assert calls.get(f"{live.management_url}/v2/health/live", timeout=60).status_code == 200
        wait_until(lambda: not refused())
    finally:
        assert live.stop() == 0, live.log
