"""HTTP as attackers write it: two requests in one, paths around a guard, headers without end, bodies in crumbs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from tests import calls
from tests.live import LiveServer
from tests.security.raw import exchange, listening, statuses, timed
from tests.server.test_keys import bearer, create_key
from tests.waiting import wait_until

HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-hidden: 1\r\n\r\n"
"""A request within a request: it must never be answered."""
CHUNKED = b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'


def post(*lines: bytes, path: bytes = b"/generate", version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join([b"POST " + path + b" " + version, b"host: x", *lines, b"", b""])


TE = b"transfer-encoding: chunked"
SMUGGLED = {
    "length and chunks": post(b"content-length: 4", TE) + b"0\r\n\r\n" + HIDDEN,
    "chunks and length": post(TE, b"content-length: 4") + b"0\r\n\r\n" + HIDDEN,
    "two lengths": post(b"content-length: 0", b"content-length: 50") + HIDDEN,
    "two lengths in one": post(b"content-length: 0, 50") + HIDDEN,
    "a signed length": post(b"content-length: +0") + HIDDEN,
    "a negative length": post(b"content-length: -1") + HIDDEN,
    "a hexadecimal length": post(b"content-length: 0x0") + HIDDEN,
    "a length with an underscore": post(b"content-length: 1_0") + b"0123456789" + HIDDEN,
    "a length of other digits": post("content-length: \u0660".encode()) + HIDDEN,
    "an empty length": post(b"content-length: ") + HIDDEN,
    "a length with a fraction": post(b"content-length: 0.0") + HIDDEN,
    "a space before the colon": post(b"transfer-encoding : chunked", b"content-length: 5") + b"0\r\n\r\n" + HIDDEN,
    "a tab before the colon": post(b"content-length\t: 0") + HIDDEN,
    "chunks of another spelling": post(b"transfer-encoding: xchunked") + b"0\r\n\r\n" + HIDDEN,
    "chunks behind a vertical tab": post(b"transfer-encoding: \x0bchunked") + b"0\r\n\r\n" + HIDDEN,
    "chunks in quotes": post(b'transfer-encoding: "chunked"') + b"0\r\n\r\n" + HIDDEN,
    "chunks twice": post(b"transfer-encoding: chunked, chunked") + b"0\r\n\r\n" + HIDDEN,
    "chunks under identity": post(b"transfer-encoding: identity", TE) + b"0\r\n\r\n" + HIDDEN,
    "chunks in HTTP/1.0": post(TE, version=b"HTTP/1.0") + b"0\r\n\r\n" + HIDDEN,
    "a folded header": post(b"transfer-encoding:\r\n chunked") + b"0\r\n\r\n" + HIDDEN,
    "a chunk with a sign": post(TE) + b"+0\r\n\r\n" + HIDDEN,
    "a chunk with 0x": post(TE) + b"0x0\r\n\r\n" + HIDDEN,
    "a chunk with an underscore": post(TE) + b"0_0\r\n\r\n" + HIDDEN,
    "a chunk of negative size": post(TE) + b"-1\r\n\r\n" + HIDDEN,
    "a chunk of huge size": post(TE) + b"f" * 40 + b"\r\n" + HIDDEN,
    "a line feed in an extension": post(TE) + b"1;a=\nb\r\nx\r\n0\r\n\r\n" + HIDDEN,
    "a chunk that is longer than it says": post(TE) + b"1\r\nxyz\r\n0\r\n\r\n" + HIDDEN,
    "bare line feeds": post(TE).replace(b"\r\n", b"\n") + b"0\n\n" + HIDDEN,
    "a carriage return in a value": post(b"x-a: 1\rcontent-length: 0") + HIDDEN,
    "a NUL in a value": post(b"x-a: \x00", b"content-length: 0") + HIDDEN,
    "a NUL in a name": post(b"x\x00a: 1", b"content-length: 0") + HIDDEN,
    "a header without a colon": post(b"content-length 0", b"content-length: 0") + HIDDEN,
    "a header without a name": post(b": 1", b"content-length: 0") + HIDDEN,
    "two hosts": post(b"host: y", b"content-length: 0") + HIDDEN,
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "a version that is none": post(b"content-length: 0", version=b"HTTP/1.11") + HIDDEN,
    "a request line of two parts": b"POST /generate\r\nhost: x\r\n\r\n" + HIDDEN,
    "a request line of four parts": post(b"content-length: 0", path=b"/generate HTTP/1.1 GET") + HIDDEN,
}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A server that asks for keys, and hangs up on slow clients soon."""
    environment = {
        "DRAGOMAN_REQUIRE_API_KEY": "true",
        "DRAGOMAN_HEADERS_TIMEOUT_S": "2",
        "DRAGOMAN_BODY_TIMEOUT_S": "5",
        "DRAGOMAN_MAX_CONNECTIONS": "600",
    }
    live = listening(LiveServer(tmp_path_factory.mktemp("strict") / "var", environment=environment))
    live.key = create_key(live)
    live.manager = create_key(live, "--scope", "manage")
    wait_until(lambda: live.get("/v1/models", headers=bearer(live.key)).status_code == 200)
    yield live
    assert live.stop() == 0, live.log


@pytest.fixture(scope="module")
def smuggling(strict):
    """What comes back for each of SMUGGLED, from several ports and with a key: all at once, because most wait for the server to hang up."""
    bearer_line = b"authorization: Bearer " + strict.key.encode() + b"\r\nhost: x"
    plain = ((strict.front_port, [401]), (strict.mindie_port, [401]), (strict.control_port, [404]))
    with ThreadPoolExecutor(32) as threads:

        def sent(port: int, request: bytes) -> Future[bytes]:
            return threads.submit(exchange, port, request, timeout_s=120)

        yield {
            name: [
                (sent(strict.front_port, request.replace(b"host: x", bearer_line, 1)), []),
                *((sent(port, request), early) for port, early in plain),
            ]
            for name, request in SMUGGLED.items()
        }


@pytest.mark.parametrize("name", SMUGGLED)
def test_no_request_hides_in_another(smuggling, name):
    """One refusal at most, and then the connection is over: no proxy can have taken the rest for another request."""
    for answer, early in smuggling[name]:
        received = answer.result()
        assert statuses(received) in ([], [400], [408], [501], [505], early), received[:300]
        assert b"x-hidden" not in received


def test_requests_one_after_the_other_are_two(strict):
    authorization = b"authorization: Bearer " + strict.key.encode()
    first = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    second = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + authorization + b"\r\nconnection: close\r\n\r\n"
    assert statuses(exchange(strict.front_port, first + second)) == [200, 200]


GUARDED = ("/v1/models", "/metrics", "/v2/repository/index", "/v1/load_lora_adapter")
AROUND = [
    "{0}", "/{0}", "//x{0}", "{0}/", "{0}//", "{0}/.", "{0}/..", "/health/..{0}", "/health/%2e%2e{0}", "/./{1}", "/.{0}",
    "{0};", "{0};/health", "{0}%00", "{0}%20", "{0}.", "{0}%2f", "{0}%23", "{0}#/health", "{0}?/health", "/%2f{1}",
    "/%{2}{3}", "{0}%c0%af", "{0}%0d%0a", "http://x{0}", "http://127.0.0.1{0}", "/health%2f..{0}", "/docs/..{0}",
    "/docs/%2e%2e{0}", "/docs/..%2f{1}", "{4}", "\\{1}", "/health\\..{0}",
]  # fmt: skip


@pytest.mark.parametrize("path", GUARDED)
def test_no_spelling_of_a_path_leads_around_its_guard(strict, path):
    rest = path[1:]
    encoded = "%" + f"{ord(rest[0]):02x}" + rest[1:]
    for form in AROUND:
        target = form.format(path, rest, f"{ord(rest[0]):02x}", rest[1:], f"/{encoded}")
        for method in ("GET", "POST", "HEAD", "get", "PUT", "OPTIONS", "TRACE", "FOO"):
            request = f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            received = exchange(strict.front_port, request.encode())
            found = statuses(received) or [400]
            assert found[0] in (400, 401, 403, 404, 405, 501), (method, target, received[:300])


@pytest.mark.parametrize("name", [
    "x-original-url", "x-rewrite-url", "x-forwarded-prefix", "x-forwarded-path", "daphne-root-path", "x-http-method-override",
    "x-script-name", "script-name", "forwarded", "x-forwarded-for", "x-real-ip", "x-remote-user", "remote-user",
])  # fmt: skip
def test_no_header_moves_a_request(strict, name):
    for value in ("/health", "/v1", "GET", "127.0.0.1", "admin"):
        assert strict.get("/v1/models", headers={name: value}).status_code == 401
        assert strict.get("/health/v1/models", headers={name: value}).status_code in (401, 404)
        admin = calls.get(f"{strict.admin_url}/admin/management/apikey/", headers={name: value}, timeout=60)
        assert admin.status_code == 302
        assert "/admin/login/" in admin.headers["location"]


@pytest.mark.parametrize("place", ["?api_key={0}", "?key={0}", "?token={0}", "?authorization=Bearer%20{0}"])
def test_a_key_in_the_address_opens_nothing(strict, place):
    assert strict.get("/v1/models" + place.format(strict.key)).status_code == 401
    for scheme in ("Basic", "Token", "ApiKey", "bearer\u00a0", "Bearer,"):
        headers = [(b"authorization", f"{scheme} {strict.key}".encode("latin-1"))]
        assert strict.get("/v1/models", headers=headers).status_code == 401
    swapped = strict.key.swapcase()
    assert strict.get("/v1/models", headers=bearer(swapped)).status_code == 401


HEADERS = {
    "one of 100 kB": [b"x: " + b"a" * 100_000],
    "many": [b"x-%d: 1" % number for number in range(5_000)],
    "one name ten thousand times": [b"x: 1"] * 10_000,
    "cookies": [b"cookie: a=b"] * 10_000,
    "one cookie of 60 kB": [b"cookie: " + b"a=b; " * 12_000],
    "commas": [b"accept: " + b"," * 60_000],
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_have_an_end(strict, name):
    process = psutil.Process(strict.process.pid)
    before, used = process.memory_info().rss, process.cpu_times()
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"\r\n".join(HEADERS[name]) + b"\r\n\r\n"
    for port in (strict.front_port, strict.control_port):
        received, took_s = timed(port, request)
        assert statuses(received) in ([], [400], [431]), received[:200]
        assert took_s < 60
    after = process.cpu_times()
    print(f"\n{name}: {(after.user + after.system - used.user - used.system) * 500:.0f} ms of CPU for a request")
    assert process.memory_info().rss - before < 10 << 20


class Crumbs:
    """A client that sends a body a byte at a time, each in a chunk of its own, as fast as it can."""

    def __init__(self, server: LiveServer) -> None:
        self.sent, self._end = 0, threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        block = b"1\r\n \r\n" * 4096
        head = post(TE, b"authorization: Bearer " + self._server.key.encode(), path=b"/v1/completions")
        address = ("127.0.0.1", self._server.front_port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=60) as connection:
            connection.sendall(head)
            while not self._end.is_set():
                connection.sendall(block)
                self.sent += len(block)

    @property
    def sends(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Crumbs:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_a_body_in_crumbs_holds_up_nobody(strict):
    process = psutil.Process(strict.process.pid)
    before = process.memory_info().rss
    slowest = 0.0
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Crumbs(strict)) for _ in range(4)]
        until = time.monotonic() + 5
        while time.monotonic() < until:
            begin = time.monotonic()
            assert strict.get("/version").status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
        wait_until(lambda: not any(client.sends for client in clients))  # each was hung up on
    print(f"\nslowest neighbour: {slowest * 1000:.0f} ms; thrown away from each: {[c.sent >> 10 for c in clients]} kB")
    assert slowest < 60
    assert process.memory_info().rss - before < 30 << 20


def test_hundreds_that_drip_stop_nobody(strict):
    """Each sends a byte of its headers now and then; all are hung up on by the deadline, and others are served meanwhile."""
    drips = [socket.create_connection(("127.0.0.1", strict.front_port), timeout=60) for _ in range(400)]
    try:
        begin, slowest, open_ones = time.monotonic(), 0.0, set(drips)
        while open_ones and time.monotonic() - begin < 60:
            for drip in list(open_ones):
                try:
                    drip.sendall(b"G")
                    drip.setblocking(False)
                    if not drip.recv(4096).startswith(b"HTTP/1.1 408"):
                        open_ones.discard(drip)
                except BlockingIOError:
                    drip.setblocking(True)
                except OSError:
                    open_ones.discard(drip)
            asked = time.monotonic()
            assert strict.get("/version").status_code == 200
            slowest = max(slowest, time.monotonic() - asked)
        print(f"\nall were closed after {time.monotonic() - begin:.1f} s; slowest neighbour {slowest * 1000:.0f} ms")
        assert not open_ones
        assert slowest < 60
    finally:
        for drip in drips:
            drip.close()
    assert strict.get("/v1/models", headers=bearer(strict.key)).status_code == 200
