"""What a request's headers decide is answered before its body is read."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests import calls
from tests.live import LiveServer
from tests.server.test_keys import bearer, create_key

HUGE = 10 << 30


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    live = LiveServer(tmp_path_factory.mktemp("guarded") / "var", environment={"DRAGOMAN_REQUIRE_API_KEY": "true"})
    live.start()
    live.key = create_key(live)
    yield live
    assert live.stop() == 0


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def is_whole(answer: bytes) -> bool:
    """Whether the body is as long as the headers say."""
    headers, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", headers.lower())
    return length is not None and len(body) >= int(length[1])


def answer_to(port: int, *parts: bytes, patient: bool = False) -> bytes:
    """Everything that comes until the server closes, which it does at once after its answer if the client does; a patient one waits for it.
    Nothing of a body is sent.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        while data := connection.recv(65536):
            received += data
            if not patient and is_whole(received):
                connection.shutdown(socket.SHUT_WR)
    return received


LENGTHS = [f"content-length: {HUGE}", "content-length: 20", "transfer-encoding: chunked"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("plane", ["front", "mindie", "management", "control"])
def test_no_body_is_awaited_without_a_key(guarded, plane, length, expects):
    port = getattr(guarded, f"{plane}_port")
    path = {"front": "/v1/completions", "mindie": "/generate", "management": "/v1/load_lora_adapter",
            "control": "/sg_inf/create"}[plane]  # fmt: skip
    lines = [length, "expect: 100-continue"] if expects else [length]
    if plane == "management" and calls.post(f"{guarded.management_url}{path}", json={}).status_code != 401:
        pytest.skip("this plane asks for no key")
    answer = answer_to(port, head(path, *lines))
    assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"www-authenticate: bearer" in answer.lower()
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        ("/v1/nothing", LENGTHS[0], 404),
        ("/v1/models", LENGTHS[0], 405),
        ("/v1/completions", LENGTHS[0], 413),
        ("/generate", LENGTHS[0], 413),
    ],
)
def test_what_is_wrong_with_a_good_key_is_said_at_once_too(guarded, path, length, status):
    authorization = f"authorization: Bearer {guarded.key}"
    for expect in ((), ("expect: 100-continue",)):
        answer = answer_to(guarded.front_port, head(path, length, authorization, *expect))
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert answer.count(b"HTTP/1.1") == 1


def test_scalegenais_clients_read_json(guarded):
    answer = answer_to(guarded.control_port, head("/sg_inf/create", LENGTHS[0], f"authorization: Bearer {guarded.key}"))
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 413")
    assert b"application/json" in headers.lower()
    assert json.loads(body)["success"] is False


def test_who_deserves_it_is_asked_to_go_on(guarded):
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    lines = (f"authorization: Bearer {guarded.key}", f"content-length: {len(body)}", "expect: 100-continue")
    with socket.create_connection(("127.0.0.1", guarded.front_port), timeout=60) as connection:
        connection.sendall(head("/v1/completions", *lines))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("with_key", [False, True])
def test_gigabytes_are_not_swallowed(guarded, chunked, with_key):
    block = b"x" * (1 << 20)
    lines = ["transfer-encoding: chunked" if chunked else f"content-length: {HUGE}"]
    lines += [f"authorization: Bearer {guarded.key}"] if with_key else []
    taken = 0
    with socket.create_connection(("127.0.0.1", guarded.front_port), timeout=60) as connection:
        connection.sendall(head("/v1/completions", *lines))
        with contextlib.suppress(ConnectionError):
            while taken < 1 << 10:
                connection.sendall(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
                taken += 1
    assert taken < 200, "the server hung up"


def test_a_body_that_comes_with_its_headers_is_refused_readably(guarded):
    for size in (2, 100_000, 1_900_000):
        answer = calls.post(f"{guarded.url}/v1/completions", content=b"x" * size)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    with httpx.Client() as client:  # the next request on what was one connection works
        assert client.post(f"{guarded.url}/v1/completions", content=b"x").status_code == 401
        assert client.get(f"{guarded.url}/v1/models", headers=bearer(guarded.key)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v2/models/x", "/generate", "/v1/chat/completions", "/tokenize"])
def test_every_dialect_says_how_to_authenticate(guarded, path):
    answer = guarded.get(path) if path.startswith(("/v1/models", "/v2")) else guarded.post(path, {})
    assert answer.status_code == 401
    assert answer.headers.get_list("www-authenticate") == ["Bearer"]


FRAMINGS = [
    ["transfer-encoding: chunked", "transfer-encoding: chunked"],
    ["transfer-encoding: chunked", "transfer-encoding: identity"],
    ["transfer-encoding: identity", "transfer-encoding: chunked"],
    ["transfer-encoding: chunked", "x: y", "transfer-encoding: identity"],
    ["transfer-encoding: identity"],
    ["transfer-encoding: identity", "content-length: 5"],
    ["content-length: 5", "transfer-encoding: chunked"],
    ["transfer-encoding: chunked", "content-length: 5"],
    ["transfer-encoding: chunked, chunked"],
    ["transfer-encoding: gzip, chunked"],
    ["transfer-encoding: gzip"],
    ["transfer-encoding: "],
    ["transfer-encoding: xchunked"],
    ["content-length: 5", "content-length: 5"],
]


@pytest.fixture(scope="module")
def framed(server):
    """The answers to requests whose framing is refused, and what may come after them; all are waited for together."""
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    requests = [head("/generate", *lines) + smuggled for lines in FRAMINGS]
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: answer_to(server.front_port, request, patient=True), requests))


@pytest.mark.parametrize("number", range(len(FRAMINGS)), ids=[", ".join(lines) for lines in FRAMINGS])
def test_only_one_framing_is_taken(framed, number):
    assert framed[number].startswith(b"HTTP/1.1 400 ")
    assert framed[number].count(b"HTTP/1.1") == 1
    assert b"connection: close" in framed[number]


def test_chunks_are_a_matter_of_http_1_1(server):
    request = b"POST /generate HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert answer_to(server.front_port, request).startswith(b"HTTP/1.1 400 ")
