"""What must not come out: keys, prompts and paths in logs, answers, metrics and files; other tenants' texts and times."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys

import grpc
import httpx
import psutil
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests import calls
from tests.conftest import ROOT
from tests.live import LiveServer
from tests.security.raw import exchange
from tests.server.test_grpc_limits import asking
from tests.server.test_keys import bearer
from tests.waiting import wait_until

PROMPT = "a-prompt-that-nobody-else-may-read"
HUB_TOKEN = "hf_a-token-that-is-shown-to-nobody"
LEAKS = re.compile(r"Traceback|File \"|line \d+, in |/home/|/usr/lib|/tmp/| at 0x[0-9a-f]{6}|psycopg|sqlite3\.|0x7f")


@pytest.fixture(scope="module", params=["console", "json"])
def live(request, tmp_path_factory):
    environment = {
        "DRAGOMAN_REQUIRE_API_KEY": "true",
        "DRAGOMAN_LOG_FORMAT": request.param,
        "DRAGOMAN_SHOW_CACHED_TOKENS": "true",
    }
    server = LiveServer(tmp_path_factory.mktemp("leaks") / "var", environment=environment).start()
    server.keys = [create_key(server) for _ in range(2)]
    server.manager = create_key(server, "--scope", "manage", "--scope", "metrics")
    wait_until(lambda: all(server.get("/v1/models", headers=bearer(key)).status_code == 200 for key in server.keys))
    wait_until(lambda: server.get("/metrics", headers=bearer(server.manager)).status_code == 200)
    yield server
    assert server.stop() == 0, server.log


def create_key(live: LiveServer, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "manage.py", "createkey", "tester", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=live.settings(), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def ask(live: LiveServer, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    return live.post("/v1/completions", body, headers=bearer(key))


def test_keys_and_prompts_are_nowhere(live):
    """Requests that succeed, fail and are refused in every way; then every log line, answer, file and process is searched."""
    first, second = live.keys
    assert ask(live, first).status_code == 200
    answers = [
        ask(live, first, max_tokens=-1),
        ask(live, first, temperature=PROMPT),
        ask(live, first, stop=[PROMPT] * 500),
        ask(live, first, guided_json={"type": PROMPT}),
        live.post("/generate", {"inputs": PROMPT, "parameters": {"top_k": 0}}, headers=bearer(first)),
        live.post(f"/{PROMPT}", {}, headers=bearer(first)),
        live.post("/v1/completions", PROMPT.encode(), headers=bearer(first)),
        live.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, headers=bearer(first)),
        calls.post(f"{live.admin_url}/sg_inf/create", content=json.dumps({"name": "x", "model": "/etc", "hf_token": HUB_TOKEN}),
                   headers=bearer(live.manager), timeout=60),
    ]  # fmt: skip
    assert [a.status_code for a in answers if a.status_code == 200] == []
    metrics = live.get("/metrics", headers=bearer(live.manager)).text
    secrets = [key.partition(".")[2] for key in (first, second, live.manager)] + [HUB_TOKEN]
    for text in (live.log, metrics, *(answer.text for answer in answers)):
        assert not [secret for secret in secrets if secret in text]
    assert PROMPT not in metrics
    lines = [line for line in live.log.splitlines() if PROMPT in line]
    assert [line for line in lines if "/" + PROMPT not in line] == [], "only a path, which is no prompt, is logged"
    for file in live.data_dir.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content], file
            assert PROMPT.encode() not in content or file.name == "test.log", file
    for process in [psutil.Process(live.process.pid), *psutil.Process(live.process.pid).children(recursive=True)]:
        try:
            shown = json.dumps([process.cmdline(), process.environ()])
        except psutil.NoSuchProcess:  # a child that has just ended shows nothing
            continue
        assert not [secret for secret in secrets if secret in shown], process


def test_files_of_the_server_are_its_own(live):
    for file in live.data_dir.rglob("*"):
        if file.name != "test.log":
            assert file.stat().st_mode & 0o077 == 0, file


def test_a_database_that_is_copied_opens_nothing(live):
    with sqlite3.connect(live.data_dir / "dragoman.sqlite3") as database:
        rows = database.execute("select prefix, hashed_key, id from management_apikey").fetchall()
    assert len(rows) == 3
    for prefix, hashed, identity in rows:
        for given in (prefix, hashed, identity, f"{prefix}.{hashed}", f"{prefix}.{hashed.partition('$')[2]}"):
            assert live.get("/v1/models", headers=bearer(given)).status_code == 401


def test_errors_tell_nothing_of_the_machine(live):
    """Every route with wrong bodies, streams and calls over gRPC included."""
    key = bearer(live.keys[0])
    found = []
    paths = [
        path
        for path, methods in live.get("/openapi.json").json()["paths"].items()
        if "post" in methods and "unload" not in path
    ]
    for path in paths:
        for body in (b"{", b"[]", b"{}", b'{"prompt": 5, "inputs": 5, "messages": 5, "text_input": 5}', b"\xff"):
            for headers in (key, bearer(live.manager)):
                answer = live.post(path.replace("{model}", "demo").replace("{id}", "x"), body, headers=headers)
                if LEAKS.search(answer.text) and answer.status_code != 200:
                    found.append((path, body, answer.text[:300]))
    assert not found
    stream = live.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 10**9}, headers=key)
    assert not LEAKS.search(stream.text)
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc_port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for message in (b"", b"\xff" * 20, pb.ModelInferRequest(model_name="x" * 100).SerializeToString()):
            with pytest.raises(grpc.RpcError) as refused:
                call(message, metadata=[("authorization", f"Bearer {live.keys[0]}")], timeout=60)
            told = refused.value.details() + str(refused.value.trailing_metadata())
            assert not LEAKS.search(told), told


ODD = "\r\nINFO forged\x1b[31m\x1b]0;title\x07\x85\u2028\u2029\x00\x08 level=critical"


def test_a_line_of_the_log_is_a_line(live):
    """Names that a client chooses: a path, a model, a field, an id, an agent; none begins a line or colours one."""
    before = len(live.log)
    key = live.keys[0]
    ask(live, key, model="odd" + ODD)
    ask(live, key, **{"field" + ODD: 1})
    ask(live, key, stop=["stop" + ODD])
    live.post("/v1/load_lora_adapter", {"lora_name": "n" + ODD, "lora_path": "p" + ODD}, headers=bearer(live.manager))
    live.post("/v1/unload_lora_adapter", {"lora_name": "n" + ODD}, headers=bearer(live.manager))
    calls.post(f"{live.admin_url}/sg_inf/create", content=json.dumps({"name": "a" + ODD, "model": ODD, "x" + ODD: 1}),
               headers=bearer(live.manager), timeout=60)  # fmt: skip
    encoded = "".join(f"%{byte:02x}" for byte in ODD.encode())
    for url in (live.url, live.mindie_url, live.djl_url, live.admin_url, live.management_url):
        calls.post(f"{url}/odd{encoded}", headers=bearer(key), timeout=60)
        calls.get(f"{url}/admin/odd{encoded}", timeout=60)
    authorization = b"authorization: Bearer " + key.encode()
    head = (
        b"\r\nhost: x\r\nx-request-id: id\x1b[31m\r\nuser-agent: a\x1b[31m\r\nconnection: close\r\n"
        + authorization
        + b"\r\n\r\n"
    )
    exchange(live.front_port, b"GET /v1/none HTTP/1.1" + head)
    exchange(live.front_port, b"GET /" + b"long" * 3000 + b" HTTP/1.1" + head)
    assert ask(live, key).status_code == 200
    wait_until(lambda: live.log[before:].count("/v1/none") >= 1)
    written = live.log[before:]
    assert "forged" in written, "the names are logged, or this test shows nothing"
    odd = [repr(c) for c in written if not c.isprintable() and c != "\n"]
    assert not odd, set(odd)
    assert not [line for line in written.splitlines() if line.startswith("INFO forged")]
    assert max(map(len, written.splitlines())) < 5000
    if live.environment["DRAGOMAN_LOG_FORMAT"] == "json":
        for line in written.splitlines():
            assert isinstance(json.loads(line), dict)


def test_names_of_clients_make_no_series(live):
    """Ten thousand models, adapters, paths and ids that are none: the metrics have as many series as before."""

    def series() -> set[str]:
        text = live.get("/metrics", headers=bearer(live.manager)).text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    def strangers(count: int) -> None:
        with httpx.Client(base_url=live.url, headers=bearer(live.keys[0]), timeout=60) as client:
            for number in range(count):
                name = f"stranger-{number}"
                client.post("/v1/completions", json={"model": name, "prompt": "x"})
                client.post(f"/v2/models/{name}/infer", json={}, headers={"x-request-id": name, "user-agent": name})
                client.get(f"/{name}", headers={"x-forwarded-for": name})
                client.post("/generate", json={"inputs": "x", "parameters": {"adapter_id": name}})

    strangers(3)
    before = series()
    strangers(250)
    after = series()
    assert after == before, sorted(after - before)[:10]
    print(f"\n{len(after)} series before and after 1000 unknown names")


def test_no_tenant_hits_what_another_has_cached(live):
    """The prefix cache is each key's own, so that neither its hits nor its times tell what others asked."""
    first, second = live.keys
    question = {"prompt": "Once upon a time there was a fox who " * 8, "max_tokens": 2}

    def cached(key: str) -> int:
        details = ask(live, key, **question).json()["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0

    assert cached(first) == 0
    own = cached(first)
    assert own > 16
    assert cached(second) == 0
    assert cached(second) == own
    assert ask(live, second, cache_salt="").status_code in (200, 400)
    for salt in ("x" * 5000, "\u0000", "a\nb", 5, ["x"]):
        assert ask(live, second, cache_salt=salt).status_code in (200, 400)


def test_no_tenant_stops_anothers_request(live):
    """MindIE's stop, and ids that are in use: both are looked up among the tenant's own."""
    first, second = live.keys
    stop = f"{live.mindie_url}/v2/models/demo/stopInfer"
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with calls.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60,
                      headers={**bearer(first), "x-request-id": "mine"}) as stream:  # fmt: skip
        chunks = stream.iter_lines()
        next(chunks)
        for name in ("mine", "cmpl-mine"):
            calls.post(stop, json={"id": name}, headers=bearer(second), timeout=60)
            live.post(f"/v1/responses/{name}/cancel", {}, headers=bearer(second))
        again = ask(live, second, max_tokens=2, request_id="mine")
        assert again.status_code in (200, 400)
        lines = [line for line in chunks if line]
    assert '"finish_reason":"length"' in lines[-2]


def test_a_stream_over_grpc_ends_with_its_own_error_alone(live):
    """Two calls of two tenants at once: the error of one does not reach the other."""
    metadata = [[("authorization", f"Bearer {key}")] for key in live.keys]
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc_port}") as channel:
        ask_one = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", lambda m: m.SerializeToString(),
                                      pb.ModelInferResponse.FromString)  # fmt: skip
        good = ask_one.future(asking(stream=False, max_tokens=200, ignore_eos=True), metadata=metadata[0], timeout=60)
        with pytest.raises(grpc.RpcError):
            ask_one(pb.ModelInferRequest(model_name="demo"), metadata=metadata[1], timeout=60)
        assert good.result().outputs[0].name == "text_output"
