"""Paths and addresses that clients name: files outside of the allowed folders, special files, and other servers."""

from __future__ import annotations

import os
import shutil
import socket
import threading

import grpc
import httpx
import pytest

from inference.dialects.torchserve.protocol import management_pb2
from tests import calls
from tests.conftest import DEMO
from tests.live import LiveServer
from tests.waiting import wait_until

ADAPTER = DEMO.parent / "demo-adapters" / "pirate"
SECRET = "a-line-that-no-client-may-read"


class Canary:
    """A server on loopback that answers everything, and counts who called."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.calls.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n")

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def canary():
    made = Canary()
    with socket.create_connection(("127.0.0.1", made.port)) as connection:  # it does count
        connection.sendall(b"x")
        wait_until(lambda: made.calls == [b"x"])
    made.calls.clear()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`allowed` with an adapter and much that leads elsewhere; `elsewhere` with an adapter and a secret."""
    base = tmp_path_factory.mktemp("sources")
    shutil.copytree(ADAPTER, base / "allowed" / "good")
    shutil.copytree(ADAPTER, base / "elsewhere" / "good")
    (base / "elsewhere" / "adapter_config.json").write_text(SECRET)
    allowed = base / "allowed"
    (allowed / "link").symlink_to(base / "elsewhere" / "good")
    (allowed / "loop").symlink_to(allowed / "loop")
    for name in ("linked file", "fifo", "device", "folder", "mem"):
        (allowed / name).mkdir()
        shutil.copy(ADAPTER / "adapter_config.json", allowed / name)
    weights = "adapter_model.safetensors"
    (allowed / "linked file" / weights).symlink_to(base / "elsewhere" / "good" / weights)
    os.mkfifo(allowed / "fifo" / weights)
    (allowed / "device" / weights).symlink_to("/dev/zero")
    (allowed / "mem" / weights).symlink_to("/proc/self/mem")
    (allowed / "folder" / weights).mkdir()
    return base


@pytest.fixture(scope="module")
def live(tmp_path_factory, folder, canary):
    environment = {
        "DRAGOMAN_ADAPTER_ROOTS": f'["{folder / "allowed"}"]',
        "DRAGOMAN_MODEL_ROOTS": f'["{folder / "allowed"}"]',
        "HF_ENDPOINT": f"http://127.0.0.1:{canary.port}",
        "HF_HUB_OFFLINE": "0",
        "HTTP_PROXY": f"http://127.0.0.1:{canary.port}",
        "HTTPS_PROXY": f"http://127.0.0.1:{canary.port}",
        "NO_PROXY": "",
    }
    server = LiveServer(tmp_path_factory.mktemp("sources-server") / "var", environment=environment).start()
    canary.calls.clear()
    yield server
    assert server.stop() == 0, server.log


def by_vllm(live: LiveServer, source: str) -> httpx.Response:
    return live.post("/v1/load_lora_adapter", {"lora_name": "odd", "lora_path": source})


def by_djl(live: LiveServer, source: str) -> httpx.Response:
    return calls.post(f"{live.djl_url}/adapters", params={"name": "odd", "src": source}, timeout=60)


def by_mindie(live: LiveServer, source: str) -> httpx.Response:
    """MindIE tells failures with the status 200 or 503; here they have that of others."""
    body = {"lora_name": "odd", "lora_path": source}
    answer = calls.post(f"{live.management_url}/v1/load_lora_adapter", json=body, timeout=60)
    assert answer.status_code in (200, 503)
    return httpx.Response(200 if answer.text.startswith("Success") else 400, text=answer.text)


def by_sg_inf(live: LiveServer, source: str) -> httpx.Response:
    """As a model, and as an adapter of one that is there; the answer to the second."""
    body = {"name": "odd", "model": source}
    refused = calls.post(f"{live.admin_url}/sg_inf/create", json=body, timeout=60)
    assert 400 <= refused.status_code < 500, refused.text
    body = {"name": "odd", "model": "demo", "llm_loras": [{"name": "odd", "src": source}]}
    return calls.post(f"{live.admin_url}/sg_inf/create", json=body, timeout=60)


CALLERS = {"vllm": by_vllm, "djl": by_djl, "mindie": by_mindie, "sg_inf": by_sg_inf}


def outside(folder) -> dict[str, str]:
    allowed, elsewhere = str(folder / "allowed"), str(folder / "elsewhere")
    return {
        "another folder": f"{elsewhere}/good",
        "a folder that is none": f"{elsewhere}/none",
        "a secret": elsewhere,
        "the system's": "/etc",
        "the root": "/",
        "up and over": f"{allowed}/../elsewhere/good",
        "up in the middle": f"{allowed}/good/../../elsewhere/good",
        "a name that begins alike": f"{allowed}-more",
        "a link": f"{allowed}/link",
        "a link to itself": f"{allowed}/loop",
        "a URL of a file": f"file://{elsewhere}/good",
        "a URL of another host's file": f"file://example.com{allowed}/good",
        "an encoded way up": f"file://{allowed}/%2e%2e/elsewhere/good",
        "backslashes": f"{allowed}\\..\\..\\elsewhere\\good",
        "a NUL": f"{allowed}/good\0/../../elsewhere",
        "an open file": "/proc/self/fd/3",
        "the process's own root": f"/proc/self/root{elsewhere}/good",
        "the process's own folder": "/proc/self/cwd",
        "a home": "~root",
        "a variable": "$HOME",
        "a very long one": "/" + "a" * 5000,
    }


NAMES = list(outside(DEMO))


@pytest.mark.parametrize("api", CALLERS)
@pytest.mark.parametrize("name", NAMES)
def test_no_path_leads_out_of_the_allowed_folders(live, folder, api, name):
    source = outside(folder)[name]
    refused = CALLERS[api](live, source)
    assert 400 <= refused.status_code <= 500, refused.text
    assert SECRET not in refused.text
    assert "Traceback" not in refused.text
    assert len(refused.text) < 8000


@pytest.mark.parametrize("api", ["vllm", "djl", "mindie"])
def test_what_is_forbidden_looks_like_what_is_missing(live, folder, api):
    """Nobody learns from a refusal which files there are."""
    answers = set()
    for path in ("elsewhere/good", "elsewhere/none", "elsewhere"):
        refused = CALLERS[api](live, str(folder / path))
        answers.add((refused.status_code, refused.text.replace(str(folder / path), "PATH").replace(path, "PATH")))
    assert len(answers) == 1, answers


@pytest.mark.parametrize("api", ["vllm", "djl", "mindie"])
@pytest.mark.parametrize("name", ["linked file", "fifo", "device", "folder", "mem"])
def test_files_that_are_none_are_refused_at_once(live, folder, api, name):
    refused = CALLERS[api](live, str(folder / "allowed" / name))
    assert 400 <= refused.status_code <= 500, refused.text
    assert "unhandled error" not in live.log


def test_what_is_allowed_is_loaded(live, folder):
    assert by_vllm(live, str(folder / "allowed" / "good")).status_code == 200
    assert live.post("/v1/unload_lora_adapter", {"lora_name": "odd"}).status_code == 200


def addresses(port: int) -> list[str]:
    """This machine's loopback, as filters forget it, and what else a server must not ask."""
    hosts = ["127.0.0.1", "localhost", "[::1]", "0", "0.0.0.0", "127.1", "2130706433", "0x7f000001", "0177.0.0.1",
             "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "user@127.0.0.1", "example.com@127.0.0.1", "127.0.0.1.nip.io",
             "\uff11\uff12\uff17.0.0.1", "169.254.169.254"]  # fmt: skip
    return [
        *[f"http://{host}:{port}/model.mar" for host in hosts],
        f"http://127.0.0.1:{port}\\@example.com/",
        f"https://127.0.0.1:{port}/x",
        f"ftp://127.0.0.1:{port}/x",
        f"s3://127.0.0.1:{port}/x",
        f"gopher://127.0.0.1:{port}/x",
        f"hdfs://127.0.0.1:{port}/x",
        f"djl://127.0.0.1:{port}/x",
        f"//127.0.0.1:{port}/x",
        f"\\\\127.0.0.1:{port}\\x",
    ]


@pytest.mark.parametrize("api", CALLERS)
def test_no_address_of_a_source_is_called(live, canary, api):
    for address in addresses(canary.port):
        refused = CALLERS[api](live, address)
        assert 400 <= refused.status_code <= 500, (address, refused.text)
    assert canary.calls == []


def test_no_address_of_a_registration_is_called(live, canary):
    """TorchServe downloads what it is told; here the last part of a URL names what is here already, or nothing."""
    with grpc.insecure_channel(f"127.0.0.1:{live.torchserve_management_port}") as channel:
        register = channel.unary_unary(
            "/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel",
            management_pb2.RegisterModelRequest.SerializeToString,
            management_pb2.ManagementResponse.FromString,
        )
        for address in addresses(canary.port):
            with pytest.raises(grpc.RpcError) as refused:
                register(management_pb2.RegisterModelRequest(url=address, model_name="odd"), timeout=60)
            assert refused.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED,
            ), (address, refused.value)  # fmt: skip
    for address in addresses(canary.port):
        answer = calls.post(f"{live.djl_url}/models", params={"url": address}, timeout=60)
        assert 400 <= answer.status_code <= 500, (address, answer.text)
    assert canary.calls == []


def test_pictures_and_links_in_texts_are_not_fetched(live, canary):
    address = f"http://127.0.0.1:{canary.port}/a.png"
    for part in (
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}},
        {"type": "video_url", "video_url": {"url": address}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": address}},
        {"type": "file", "file": {"file_data": address}},
    ):
        body = {"model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}]}
        for base in (live.url, live.mindie_url):
            refused = calls.post(f"{base}/v1/chat/completions", json=body, timeout=60)
            assert 400 <= refused.status_code < 500, (part, refused.text)
    text = f"![a]({address}) <img src='{address}'> {address}"
    assert live.post("/generate", {"inputs": text, "parameters": {"max_new_tokens": 1}}).status_code == 200
    messages = [{"role": "user", "content": text}]
    assert live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).status_code == 200
    schema = {"$ref": address}
    body = {"prompt": "a", "max_tokens": 4, "guided_json": schema}
    assert live.post("/v1/completions", body).status_code in (200, 400)
    assert canary.calls == []
