"""TorchServe's keys: their file, their expiry and replacement, and what each opens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from google.protobuf import message_factory

from inference.dialects.torchserve import grpc_inference, grpc_management
from inference.dialects.torchserve.dialect import configure
from inference.dialects.torchserve.key_file import FILE, KeyFile
from inference.dialects.torchserve.protocol import inference_pb2 as infer
from inference.dialects.torchserve.protocol import management_pb2 as manage
from inference.dialects.torchserve.settings import TorchServeSettings
from inference.http.auth import Authenticator
from inference.planes.declaration import SetupError
from management.snapshot import ApiKeyEntry, hash_key

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def keys(tmp_path, clock):
    made = KeyFile(tmp_path, 3600, clock)
    made.create()
    yield made
    made.remove()


def read(tmp_path):
    return json.loads((tmp_path / FILE).read_text())


def test_the_file(keys, tmp_path):
    written = read(tmp_path)
    assert list(written) == ["management", "inference", "API"]
    assert set(written["management"]) == {"key", "expiration time"}
    assert set(written["API"]) == {"key"}
    assert written["inference"]["expiration time"] == "1970-01-12T14:46:40.000000Z"
    assert all(len(entry["key"]) >= 22 for entry in written.values())  # 128 bits as base64
    assert len({entry["key"] for entry in written.values()}) == 3
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    keys.remove()
    assert not list(tmp_path.iterdir())
    keys.remove()


def test_expiry_and_replacement(keys, clock, tmp_path):
    def opens(kind, header=None):
        return keys.opens(kind, header or f"Bearer {read(tmp_path)[kind]['key']}")

    assert all(opens(kind) for kind in ("management", "inference", "API"))
    old = f"Bearer {read(tmp_path)['inference']['key']}"
    assert keys.replace("inference") == read(tmp_path)["inference"]
    assert opens("inference")
    assert not opens("inference", old)
    clock.now += 3600
    assert [opens(kind) for kind in ("management", "inference", "API")] == [False, False, True]
    assert not any(
        opens("API", header) for header in ("Bearer", "Bearer  ", "Basic x", read(tmp_path)["API"]["key"], "\xff")
    )


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()


async def test_over_grpc(begin, keys, tmp_path):
    server = await begin(keys=keys)
    for header in (
        (),
        (("authorization", "Bearer incorrect-token"),),
        (("authorization", f"Bearer {read(tmp_path)['API']['key']}"),),
    ):
        server.metadata = header
        for call in (server.manage("ListModels"), server.predict(data=b"a")):
            assert await refused(call) == ("PERMISSION_DENIED", REFUSED)
    server.metadata = (("authorization", f"Bearer {read(tmp_path)['management']['key']}"),)
    assert await server.manage("ListModels")
    assert (await refused(server.predict(data=b"a")))[1] == REFUSED
    server.metadata = (("authorization", f"Bearer {read(tmp_path)['inference']['key']}"),)
    assert await server.predict(data=b"The capital")
    assert (await refused(server.manage("ListModels")))[1] == REFUSED


async def no_message():
    """An open stream of requests without one: a client of `grpc.aio` that writes while the call is refused reads
    INTERNAL at times (grpc/grpc#36066), and a refusal needs no message."""
    await asyncio.Event().wait()
    yield


def every_method(server):
    """All methods of both services, each with a request, or with a stream of requests that stays open."""
    for service, module in ((grpc_inference, infer), (grpc_management, manage)):
        (found,) = module.DESCRIPTOR.services_by_name.values()
        for method in found.methods:
            kind = "_".join(
                "stream" if each else "unary" for each in (method.client_streaming, method.server_streaming)
            )
            call = getattr(server.channel, kind)(
                f"/{service.SERVICE}/{method.name}", lambda m: m.SerializeToString(), bytes
            )
            yield (
                method.name,
                call,
                no_message() if method.client_streaming else message_factory.GetMessageClass(method.input_type)(),
            )


async def test_every_call_needs_its_key(begin, keys, clock, tmp_path):
    server = await begin(keys=keys)
    written = read(tmp_path)
    foreign = [
        f"Bearer {written['API']['key']}",
        "Bearer x",
        "Bearer",
        written["inference"]["key"],
        f"Basic {written['inference']['key']}",
    ]
    clock.now += 3600
    expired = [f"Bearer {written[kind]['key']}" for kind in ("management", "inference")]
    refusals = []
    for header in (None, *foreign, *expired):
        metadata = () if header is None else (("authorization", header),)
        for name, call, request in every_method(server):
            running = call(request, metadata=metadata, timeout=10)
            assert ((await running.code()).name, await running.details()) == ("PERMISSION_DENIED", REFUSED), (
                name,
                header,
            )
            refusals.append(name)
    assert len(set(refusals)) == 10
    assert not server.worker.submits


async def test_api_keys_of_this_server_open_the_same(begin, keys):
    server = await begin(keys=keys)
    text = "abcdefgh.secret"
    server.serving.keys = {"abcdefgh": ApiKeyEntry("abcdefgh", "k", hash_key(text), frozenset({"infer"}), None)}
    server.registry.publish()
    server.metadata = (("authorization", f"Bearer {text}"),)
    assert await server.predict(data=b"The capital")
    assert (await refused(server.manage("ListModels")))[1] == REFUSED


async def test_the_servers_own_keys_open_the_same(begin, keys):
    server = await begin(keys=keys)
    server.serving.services.authenticator.own.extend(Authenticator(True, ["mine"]).own)
    server.metadata = (("authorization", "Bearer mine"),)
    assert await server.predict(data=b"The capital")
    assert (await refused(server.manage("ListModels")))[1] == REFUSED


async def test_over_rest(begin, keys, tmp_path):
    server = await begin(keys=keys)
    serving = server.serving
    answer = await serving.get("/models/demo", plane="ts-management", authorization="Bearer incorrect")
    assert answer.status == 400
    assert answer.json() == {"code": 400, "type": "InvalidKeyException", "message": REFUSED}
    for path, plane in (("/ping", "inference"), ("/wfpredict/x", "inference"), ("/workflows", "management")):
        assert (await serving.get(path, plane=f"ts-{plane}")).status == 400
    own = f"Bearer {read(tmp_path)['management']['key']}"
    assert (await serving.get("/models/demo", plane="ts-management", authorization=own)).status == 200
    assert (await serving.get("/token?type=inference", plane="ts-management", authorization=own)).status == 400
    api = f"Bearer {read(tmp_path)['API']['key']}"
    before = read(tmp_path)["inference"]
    answer = await serving.get("/token?type=inference", plane="ts-management", authorization=api)
    assert answer.json() == read(tmp_path)["inference"] != before
    answer = await serving.get("/token?type=other", plane="ts-management", authorization=api)
    assert (answer.status, answer.json()["type"]) == (400, "BadRequestException")


class Options:
    max_body_bytes, body_timeout_s, slow_client_timeout_s = 2_000_000, 60.0, 30.0

    def __init__(self, host: str = "127.0.0.1", data_dir: Path = Path("/nowhere")) -> None:
        self.host, self.data_dir = host, data_dir


@pytest.mark.parametrize(("host", "setting", "asked"), [
    ("127.0.0.1", "auto", False), ("::1", "auto", False), ("localhost", "auto", False), ("0.0.0.0", "auto", True),
    ("10.0.0.1", "auto", True), ("example.com", "auto", True), ("0.0.0.0", "off", False), ("127.0.0.1", "on", True),
])  # fmt: skip
async def test_when_they_are_asked_for(start, tmp_path, host, setting, asked):
    serving = await start(0)
    settings = TorchServeSettings(torchserve_token_authorization=setting, torchserve_key_folder=tmp_path)
    parts = configure(settings, Options(host)).start(serving.services, lambda _: None)
    assert (tmp_path / FILE).exists() == asked
    assert {each.port for each in parts.grpc} == {7070, 7071}
    assert {each.host for each in parts.grpc} == {host}
    assert [each.port for each in parts.planes] == [0, 0, 0]


async def test_a_folder_that_cannot_be_used(start, tmp_path):
    settings = TorchServeSettings(torchserve_token_authorization="on", torchserve_key_folder=tmp_path / "none")
    with pytest.raises(SetupError):
        configure(settings, Options())


async def test_keys_that_cannot_be_written(start, tmp_path):
    serving = await start(0)
    parts = configure(TorchServeSettings(), Options("0.0.0.0")).start(serving.services, lambda _: None)
    assert parts.planes[0].authenticator.required  # only API keys open it
    forced = configure(TorchServeSettings(torchserve_token_authorization="on"), Options())
    with pytest.raises(SetupError):
        forced.start(serving.services, lambda _: None)
    configure(TorchServeSettings(), Options("0.0.0.0", tmp_path)).start(serving.services, lambda _: None)
    assert (tmp_path / FILE).exists()


def test_urls_that_are_no_patterns():
    with pytest.raises(ValueError, match="regular expression"):
        TorchServeSettings(torchserve_allowed_urls=["("])
