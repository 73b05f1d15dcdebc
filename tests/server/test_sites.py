"""Pages of other sites in the browser of somebody who can reach the server: they change nothing and read nothing."""

from __future__ import annotations

from contextlib import nullcontext

import httpx
import pytest

from inference.errors import ForeignOrigin
from inference.http.sites import Sites
from tests import calls
from tests.live import LiveServer

ASK = {"prompt": "Hi", "max_tokens": 1}
PLANES = ("url", "mindie_url", "management_url", "metrics_url", "admin_url")
OPEN = {"url": "/health", "mindie_url": "/v1/models", "management_url": "/v2/health/live", "metrics_url": "/metrics",
        "admin_url": "/admin/login/"}  # fmt: skip
PLAIN = {"content-type": "text/plain"}
CHANGES = [
    ("url", "POST", "/v1/completions"),
    ("url", "POST", "/generate"),
    ("url", "POST", "/v1/load_lora_adapter"),
    ("url", "POST", "/v1/unload_lora_adapter"),
    ("url", "POST", "/v2/repository/models/demo/unload"),
    ("mindie_url", "POST", "/infer"),
    ("management_url", "POST", "/v1/load_lora_adapter"),
    ("management_url", "GET", "/stopService"),
    ("management_url", "GET", "/health/timed"),
    ("admin_url", "POST", "/admin/login/"),
]


@pytest.mark.parametrize("plane", PLANES)
def test_a_name_that_is_not_the_servers_own_is_refused(server, plane):
    with httpx.Client() as client:
        for host in ("rebound.example", "127.0.0.1.rebound.example", "localhost.rebound.example:8000",
                     "127.0.0.1@rebound.example", "[::1].rebound.example", ""):  # fmt: skip
            answer = client.get(getattr(server, plane) + OPEN[plane], headers={"host": host})
            assert answer.status_code == 403, (host, answer.text)


@pytest.mark.parametrize("plane", PLANES)
def test_own_names_addresses_and_names_without_a_dot_are_served(server, plane):
    with httpx.Client() as client:
        served = client.get(getattr(server, plane) + OPEN[plane]).status_code
        assert served != 403
        for host in ("localhost", "localhost:1", "LOCALHOST.", "a.localhost", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000",
                     "[fd00::1]", "server", "server:8000"):  # fmt: skip
            answer = client.get(getattr(server, plane) + OPEN[plane], headers={"host": host})
            assert answer.status_code == served, (host, answer.text)


@pytest.mark.parametrize(("plane", "method", "path"), CHANGES)
def test_pages_of_other_sites_change_nothing(server, plane, method, path):
    with httpx.Client() as client:
        for headers in ({"origin": "https://foreign.example"}, {"origin": "null"}, {"origin": "http://localhost:3000"},
                        {"origin": "http://127.0.0.1"}, {"sec-fetch-site": "cross-site"},
                        {"sec-fetch-site": "same-site"}):  # fmt: skip
            answer = client.request(method, getattr(server, plane) + path, content="{}", headers={**PLAIN, **headers})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
    assert server.healthy()


@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}])
def test_own_pages_and_programs_are_served(server, headers):
    assert server.post("/v1/completions", ASK, headers=headers).status_code == 200
    assert server.post("/v1/completions", ASK, headers={**headers, "origin": server.url}).status_code == 200
    assert server.get("/v1/models", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # which it cannot read


@pytest.mark.parametrize(("host", "origin", "own"), [
    (b"a.example", b"https://a.example", True), (b"a.example:443", b"https://a.example", True),
    (b"A.example:80", b"http://a.example", True), (b"a.example:8000", b"http://a.example:8000", True),
    (b"a.example:8000", b"http://a.example", False), (b"a.example", b"https://b.a.example", False),
    (b"a.example", b"ftp://a.example", False), (b"", b"https://", False), (b"a.example", b"a.example", False),
])  # fmt: skip
def test_whose_origin_is_the_servers_own(host, origin, own):
    with nullcontext() if own else pytest.raises(ForeignOrigin):
        Sites().check_origin({b"host": host, b"origin": origin})


def test_each_dialect_refuses_in_its_own_words(server):
    foreign = {"origin": "https://foreign.example"}
    assert server.post("/v1/completions", ASK, headers=foreign).json()["error"]["type"] == "PermissionDeniedError"
    assert server.post("/generate_stream", {"inputs": "a"}, headers=foreign).json()["error_type"] == "forbidden"
    assert list(server.post("/v2/models/demo/infer", {}, headers=foreign).json()) == ["error"]
    told = calls.post(f"{server.mindie_url}/infer", json={}, headers=foreign).json()
    assert told["error_type"] == "Forbidden"


def test_websockets_of_other_sites_are_refused(server):
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
               "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    for extra in ({"origin": "https://foreign.example"}, {"host": "rebound.example"}):
        answer = calls.get(f"{server.admin_url}/ws/status", headers={**upgrade, **extra})
        assert answer.status_code == 403


@pytest.fixture(scope="module")
def open_server(tmp_path_factory):
    environment = {
        "DRAGOMAN_ALLOWED_HOSTS": '["models.example", ".lan.example"]',
        "DRAGOMAN_ALLOWED_ORIGINS": '["https://chat.example/"]',
    }
    live = LiveServer(tmp_path_factory.mktemp("sites") / "var", environment=environment).start()
    yield live
    assert live.stop() == 0


def test_allowed_names_are_served(open_server):
    for host, status in (("models.example", 200), ("a.b.lan.example", 200), ("lan.example:8000", 200),
                         ("x.models.example", 403), ("evillan.example", 403)):  # fmt: skip
        assert open_server.get("/health", headers={"host": host}).status_code == status, host


def test_allowed_pages_may_ask_and_read(open_server):
    origin = {"origin": "https://chat.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = calls.options(f"{open_server.url}/v1/chat/completions", headers={**origin, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for stream in (False, True):
        answer = open_server.post("/v1/completions", {**ASK, "stream": stream}, headers=origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    # the admin's session is nobody else's
    assert calls.post(f"{open_server.admin_url}/admin/login/", headers=origin).status_code == 403
    foreign = {"origin": "https://foreign.example"}
    assert calls.options(f"{open_server.url}/v1/models", headers={**foreign, **asked}).status_code == 405
