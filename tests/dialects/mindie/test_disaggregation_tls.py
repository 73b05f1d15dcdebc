"""Two servers whose calls to each other are by mutual TLS, and clients that know nothing of roles before them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import textwrap

import grpc
import httpx
import pytest

from inference.dialects.mindie.disaggregation.peers import RELEASE
from tests.certificates import Authority, Issued, replace
from tests.clients.conftest import PYTHON
from tests.coordinator import FrontDoor
from tests.dialects.mindie.config_file import write
from tests.dialects.mindie.test_disaggregation import Member, Pair
from tests.live import LiveServer, free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.live]

MODEL = "demo"
PROMPT = "Once upon a time there was"


def member(folder, number: int, authority: Authority) -> Member:
    """A server with a config.json and the files that it names."""
    for name in ("ca", "certs", "keys"):
        (folder / "security" / "grpc" / name).mkdir(parents=True)
    certificate, key = authority.issue().write(folder / "security" / "grpc" / "certs", "server")
    key.rename(folder / "security" / "grpc" / "keys" / "server.key.pem")
    assert certificate.name == "server.pem"
    replace(folder / "security" / "grpc" / "ca" / "ca.pem", authority.pem)
    server, port = LiveServer(folder / "var"), free_port()
    ports = {"port": server.mindie_port, "managementPort": server.management_port, "metricsPort": server.metrics_port}
    path = write(
        folder,
        server={**ports, "inferMode": "dmi", "interCommTLSEnabled": True, "interCommPort": port},
        model={"modelName": MODEL},
        deploy={"maxSeqLen": 2048, "maxInputTokenLen": 512},
        schedule={"maxIterTimes": 1500, "maxPrefillTokens": 512},
    )
    server.environment = {"DRAGOMAN_MINDIE_CONFIG": str(path)}
    return Member(server.start(wait=False), port, number)


@pytest.fixture(scope="module")
def authority():
    return Authority("instances")


@pytest.fixture(scope="module")
def pair(tmp_path_factory, authority):
    members = [member(tmp_path_factory.mktemp(f"member{number}"), number, authority) for number in (1, 2)]
    try:
        for each in members:
            each.server.wait_ready()
        made = Pair(*members)
        made.link()
        yield made
    except BaseException:
        for each in members:
            each.server.stop(signal.SIGKILL)
        raise
    for each in members:
        assert each.server.stop() == 0, each.server.log


def said(program: str, url: str) -> str:
    """What a program prints in the clients' environment."""
    code = f"URL = {url!r}\nPROMPT = {PROMPT!r}\n" + textwrap.dedent(program)
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OPENAI = """
    from openai import OpenAI
    client = OpenAI(base_url=URL + "/v1", api_key="x", max_retries=0)
    asked = {"model": "demo", "max_tokens": 24, "temperature": 0.7, "seed": 11}
    whole = client.completions.create(prompt=PROMPT, **asked)
    print(repr(whole.choices[0].text), whole.choices[0].finish_reason, whole.usage.completion_tokens)
    parts = list(client.completions.create(prompt=PROMPT, stream=True, **asked))
    print(repr("".join(part.choices[0].text for part in parts if part.choices)))
    chat = {"messages": [{"role": "user", "content": PROMPT}], **asked}
    print(repr(client.chat.completions.create(**chat).choices[0].message.content))
    parts = list(client.chat.completions.create(stream=True, **chat))
    print(repr("".join(part.choices[0].delta.content or "" for part in parts if part.choices)))
"""


async def test_a_client_that_knows_nothing_of_roles(pair, server):
    """It gets from two instances, through the coordinator's own port, what one server tells it."""
    expected = await asyncio.to_thread(said, OPENAI, server.mindie_url)
    fetched = pair.decode.server.metric("dragoman_kv_blocks_fetched_total")
    async with pair.coordinator() as coordinator, FrontDoor(coordinator, MODEL) as door:
        assert await asyncio.to_thread(said, OPENAI, door.url) == expected
    assert len(expected) > 50
    await eventually(lambda: pair.decode.server.metric("dragoman_kv_blocks_fetched_total") > fetched, 30)


async def test_a_client_that_hangs_up_at_the_coordinator(pair):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with pair.coordinator() as coordinator, FrontDoor(coordinator, MODEL) as door, httpx.AsyncClient() as client:
        async with client.stream("POST", door.url + "/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            async for _ in response.aiter_bytes():
                break
        await eventually(lambda: pair.decode.status()["resource"]["runningRequestNum"] == 0, 60)


async def test_refusals_reach_the_client(pair):
    async with pair.coordinator() as coordinator, FrontDoor(coordinator, MODEL) as door, httpx.AsyncClient() as client:
        answer = await client.post(door.url + "/v1/completions", json={"model": MODEL, "prompt": 5}, timeout=60)
    assert answer.status_code in (400, 422)
    assert json.loads(answer.content)["error"]


def credentials(trusted: Authority, shown: Issued | None, folder) -> grpc.ChannelCredentials:
    if shown is None:
        return grpc.ssl_channel_credentials(trusted.pem)
    certificate, key = shown.write(folder, "shown")
    return grpc.ssl_channel_credentials(trusted.pem, key.read_bytes(), certificate.read_bytes())


@pytest.mark.parametrize("shows", ["plain text", "no certificate", "a stranger's", "its own"])
def test_calls_from_others_need_a_certificate(pair, authority, tmp_path, shows):
    address = f"127.0.0.1:{pair.prefill.port}"
    if shows == "plain text":
        channel = grpc.insecure_channel(address)
    else:
        issuer = {"no certificate": None, "a stranger's": Authority("stranger"), "its own": authority}[shows]
        channel = grpc.secure_channel(address, credentials(authority, issuer and issuer.issue(), tmp_path))
    with channel:
        call = channel.unary_unary(RELEASE)
        if shows == "its own":
            assert call(b"", timeout=30) == b""
        else:
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
