"""`conformance` passes where every dialect keeps its promises, and fails where one does not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from config.conformance import run
from config.conformance.run import DIALECTS, addresses_of
from tests.conftest import ROOT

START_S = 300
pytestmark = pytest.mark.timeout(2 * START_S)


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "manage.py", "conformance", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def planes(server) -> list[str]:
    return [
        server.url, "--djl", server.djl_url, "--mindie", server.mindie_url, "--triton-grpc", f"127.0.0.1:{server.grpc_port}",
        "--torchserve-grpc", f"127.0.0.1:{server.torchserve_inference_port}",
    ]  # fmt: skip


def test_it_works(server):
    done = conformance(*planes(server), "--json")
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == 0, [check for check in checks if check["outcome"] != "passed"]
    assert Counter(check["outcome"] for check in checks) == {
        "passed": sum(len(each.checks) for each in DIALECTS.values())
    }
    assert {check["dialect"] for check in checks} == set(DIALECTS)


def test_a_plane_of_another_dialect_fails(server):
    done = conformance(server.url, "--dialect", "mindie", "--dialect", "vllm", "--mindie", server.url)
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    assert any(line.startswith("failed") and " mindie " in line for line in lines)
    assert next(line for line in lines if line.startswith("vLLM ")).split() == ["vLLM", "3", "0", "0"]
    assert next(line for line in lines if line.startswith("MindIE ")).split()[2] != "0"


def test_what_is_not_checked(server):
    done = conformance(server.url, "--dialect", "djl", "--djl", "none")
    assert done.returncode == 2, done.stdout
    for wrong in (
        ["127.0.0.1"],
        ["ftp://127.0.0.1"],
        [server.url, "--dialect", "smtp"],
        [server.url, "--key-file", "/none"],
    ):
        assert conformance(*wrong).returncode == 2


def test_an_unknown_model_fails(server):
    done = conformance(server.url, "--dialect", "openai", "--model", "there-is-none")
    assert done.returncode == 1
    assert "status 404" in done.stdout


class Liar(BaseHTTPRequestHandler):
    """Answers everything with the same completion, whatever was asked."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        choice = {"index": 0, "text": " a b", "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 4}
        body = json.dumps({"data": [{"id": "m"}], "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_lies_fails_every_check(capsys):
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as liar:
        threading.Thread(target=liar.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{liar.server_port}"
        asked = [word for name in ("openai", "vllm", "tgi", "triton", "mindie") for word in ("--dialect", name)]
        status = run.main("dragoman", [url, *asked, "--mindie", url, "--json"])
        liar.shutdown()
    assert status == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check for check in checks if check["outcome"] != "failed"] == []


def test_a_server_that_is_not_there_fails(capsys):
    status = run.main("dragoman", ["http://127.0.0.1:9", "--dialect", "openai", "--timeout", "1"])
    assert status == 1
    assert "no answer" in capsys.readouterr().out


def test_the_usual_addresses():
    found = addresses_of(run._parser("dragoman").parse_args(["https://[::1]:8443/", "--djl", "none"]))
    assert (found.front, found.djl, found.mindie) == ("https://[::1]:8443", "", "https://[::1]:1025")
    assert (found.triton_grpc, found.torchserve_grpc) == ("[::1]:8001", "[::1]:7070")
