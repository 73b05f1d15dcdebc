"""API keys where they are required."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.live import LiveServer, wait_until


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    live = LiveServer(tmp_path_factory.mktemp("guarded") / "var", environment={"DRAGOMAN_REQUIRE_API_KEY": "true"})
    live.start()
    yield live
    assert live.stop() == 0


def create_key(live, *arguments) -> str:
    import os

    environment = {**os.environ, "DRAGOMAN_DATA_DIR": str(live.data_dir)}
    command = [sys.executable, "-W", "ignore", "manage.py", "createkey", "tester", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_without_a_key_nothing_but_health_and_docs(guarded):
    table = guarded.get("/openapi.json").json()["paths"]
    public = {"/", "/health", "/ping", "/docs", "/docs/{name}", "/openapi.json"}
    for path, methods in table.items():
        for method in methods:
            if method == "get" and path in public:
                continue
            answer = guarded.post(path, {}) if method == "post" else guarded.get(path)
            assert answer.status_code == 401, path
    assert guarded.get("/v1/models").json() == {"error": "Unauthorized"}


def test_a_key_opens_what_its_scopes_say(guarded):
    key = create_key(guarded)
    wait_until(lambda: guarded.get("/v1/models", headers=bearer(key)).status_code == 200, 5)
    ask = {"prompt": "x", "max_tokens": 1}
    assert guarded.post("/v1/completions", ask, headers=bearer(key)).status_code == 200
    assert guarded.get("/metrics", headers=bearer(key)).status_code == 403
    scraper = create_key(guarded, "--scope", "metrics")
    wait_until(lambda: guarded.get("/metrics", headers=bearer(scraper)).status_code == 200, 5)
    assert guarded.get("/v1/models", headers=bearer(scraper)).status_code == 403
    assert key not in guarded.log


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer nope", "Basic eDp5", "Bearer a.b", "Bearer " + "x" * 5000])
def test_bad_keys(guarded, header):
    answer = guarded.get("/info", headers={"authorization": header})
    assert answer.status_code == 401
    assert answer.json()["error_type"] == "unauthorized"
