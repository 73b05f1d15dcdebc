"""Too many requests, and a worker that dies in mid-stream: told by every dialect in its own words."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest

from tests import calls
from tests.live import LiveServer, wait_until

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": "demo", "prompt": "a"}
TENSOR = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
FRONT = [
    ("/v1/completions", TEXT, 503, lambda b: b["error"]["type"] == "Service Unavailable"),
    ("/v1/chat/completions", CHAT, 503, lambda b: b["error"]["code"] == 503),
    ("/v1/responses", {"input": "a"}, 503, lambda b: b["error"]["type"] == "Service Unavailable"),
    ("/v1/embeddings", {"input": "a"}, 503, lambda b: b["error"]["code"] == 503),
    ("/tokenize", TEXT, 503, lambda b: b["error"]["code"] == 503),
    ("/generate", {"prompt": "a"}, 503, lambda b: b["error"]["code"] == 503),
    ("/generate", {"inputs": "a"}, 429, lambda b: b == {"error": "Model is overloaded", "error_type": "overloaded"}),
    ("/", {"inputs": "a"}, 429, lambda b: b["error_type"] == "overloaded"),
    ("/v2/models/demo/infer", TENSOR, 503, lambda b: list(b) == ["error"]),
    ("/v2/models/demo/generate", {"text_input": "a"}, 503, lambda b: list(b) == ["error"]),
    ("/v2/models/demo/generate_stream", {"text_input": "a"}, 503, lambda b: list(b) == ["error"]),
]
MINDIE = [
    ("/", {"inputs": "a"}), ("/generate", {"prompt": "a"}), ("/generate_stream", {"inputs": "a"}), ("/infer", {"inputs": "a"}),
    ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/v2/models/demo/generate", {"text_input": "a"}),
    ("/v2/models/demo/generate_stream", {"text_input": "a"}),
]  # fmt: skip


CONNECTIONS = 300
"""Far more than a listener's usual queue holds."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A server with one place, and the place taken."""
    environment = {
        "DRAGOMAN_MAX_CONCURRENT_REQUESTS": "1",
        "DRAGOMAN_MAX_CONNECTIONS": str(CONNECTIONS),
        "DRAGOMAN_SPECULATIVE_TOKENS": "0",
    }
    server = LiveServer(tmp_path_factory.mktemp("narrow") / "var", environment=environment).start()
    stop = threading.Event()

    def occupy():
        body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            with calls.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                for _ in answer.iter_lines():
                    if stop.is_set():
                        break

    thread = threading.Thread(target=occupy)
    thread.start()
    yield server
    stop.set()
    thread.join(60)
    assert server.stop() == 0


def refused(server, url, body, status):
    """The answer while the place is taken; between two of its occupants one may slip in."""
    found = []

    def full():
        found.append(calls.post(url, json=body, timeout=60))
        return found[-1].status_code == status

    wait_until(full, 60, lambda: found[-1].text)
    return found[-1]


@pytest.mark.parametrize(("path", "body", "status", "told"), FRONT)
def test_the_front_planes_dialects(narrow, path, body, status, told):
    answer = refused(narrow, narrow.url + path, body, status)
    assert int(answer.headers["retry-after-ms"]) == 1000 * int(answer.headers["retry-after"]) > 0
    assert told(answer.json()), answer.text


def test_tgis_streams_tell_it_in_a_frame(narrow):
    frames = []

    def full():
        frames.append(calls.post(f"{narrow.url}/generate_stream", json={"inputs": "a"}, timeout=60).text)
        return "overloaded" in frames[-1]

    wait_until(full)
    assert frames[-1] == 'data: {"error":"Model is overloaded","error_type":"overloaded"}\n\n'


@pytest.mark.parametrize(("path", "body"), MINDIE)
def test_mindie(narrow, path, body):
    answer = refused(narrow, narrow.mindie_url + path, body, 503)
    assert int(answer.headers["retry-after-ms"]) == 1000 * int(answer.headers["retry-after"]) > 0
    assert answer.json() == {"error": "Too many requests", "error_type": "Service Unavailable"}


def test_connections_have_a_limit_and_come_back(narrow):
    with contextlib.ExitStack() as stack:

        def refused_one():
            address = ("127.0.0.1", narrow.front_port)
            with contextlib.suppress(ConnectionError):  # also while it is being made
                connection = stack.enter_context(socket.create_connection(address, timeout=60))
                connection.sendall(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n")
                return connection.recv(1000) == b""
            return True

        served = 0
        while not refused_one():
            served += 1
        assert CONNECTIONS - 10 < served <= CONNECTIONS
    wait_until(narrow.healthy)


LONG = {"max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 2.0, "seed": 1}
HOT = {"max_new_tokens": 2000, "do_sample": True, "temperature": 5.0, "seed": 1}
ITEMS = {"type": "array", "items": {"const": 1}, "minItems": 900}
ENDLESS = {
    "type": "json_schema",
    "name": "a",
    "schema": {"type": "object", "properties": {"a": ITEMS}, "required": ["a"]},
}
STREAMS = [
    ("front", "/v1/completions", {**TEXT, **LONG}, '"error":{"message":"The worker that served this request died."'),
    ("front", "/v1/chat/completions", {**CHAT, **LONG, "temperature": 2.0}, '"error":{"message":"The worker'),
    (
        "front",
        "/v1/responses",
        {"input": "a", "stream": True, "temperature": 0, "max_output_tokens": 1900, "text": {"format": ENDLESS}},
        "event: response.failed",
    ),
    ("front", "/generate", {"prompt": "a", **LONG}, '"error":{"message":"The worker'),
    ("front", "/generate_stream", {"inputs": "a", "parameters": HOT}, '"error_type":"generation"'),
    ("front", "/v2/models/demo/generate_stream", {"text_input": "a", **LONG}, '{"error":"The worker'),
    ("mindie", "/v1/completions", {**TEXT, **LONG}, "Failed to get engine response"),
    ("mindie", "/generate_stream", {"inputs": "a", "parameters": HOT}, "Failed to get engine response"),
    ("mindie", "/infer", {"inputs": "a", "stream": True, "parameters": HOT}, "Failed to get engine response"),
    (
        "mindie",
        "/v2/models/demo/generate_stream",
        {"text_input": "a", "parameters": HOT},
        "Failed to get engine response",
    ),
]


def test_a_worker_that_dies_in_mid_stream(tmp_path):
    """All streams at once, and one killed worker; no other is there, and none is waited for."""
    environment = {"DRAGOMAN_SPECULATIVE_TOKENS": "0", "DRAGOMAN_REPLAY_WAIT_S": "0"}
    server = LiveServer(tmp_path / "var", environment=environment).start()
    texts: dict[int, str] = {}
    begun = [threading.Event() for _ in STREAMS]

    def read(index):
        plane, path, body, _ = STREAMS[index]
        base = server.url if plane == "front" else server.mindie_url
        received = ""
        with calls.stream("POST", base + path, content=json.dumps(body), timeout=60) as answer:
            for part in answer.iter_text():
                received += part
                begun[index].set()
        texts[index] = received

    threads = [threading.Thread(target=read, args=[index]) for index in range(len(STREAMS))]
    for thread in threads:
        thread.start()
    assert all(event.wait(60) for event in begun)
    server.workers()[0].kill()
    for thread in threads:
        thread.join(60)
    for index, (_, path, _, mark) in enumerate(STREAMS):
        tail = texts[index][-2000:]
        assert mark in tail, (path, tail)
        if path.startswith("/v1/c") and STREAMS[index][0] == "front":
            assert texts[index].endswith("data: [DONE]\n\n")
    wait_until(server.healthy, 60, lambda: server.log)
    assert server.stop() == 0
