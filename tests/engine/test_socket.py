"""A worker process on its socket, by each transport: greeting, streams, slow clients, garbage, drain, the lifeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from contextlib import aclosing
from itertools import takewhile
from pathlib import Path

import msgspec
import psutil
import pytest

from engine import client as client_module
from engine import greeting
from engine.address import Channel, TcpAddress, parse
from engine.client import EngineClient, EngineDead
from engine.config import EngineConfig
from engine.messages import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    FrameBuffer,
    Hello,
    ProtocolError,
    Submit,
    frame,
)
from engine.sampling.params import SamplingParams
from tests.certificates import Authority, credentials
from tests.conftest import DEMO, ROOT
from tests.live import free_port
from tests.waiting import eventually, wait_until

pytestmark = pytest.mark.full

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@contextlib.contextmanager
def started(transport: str, folder: Path):
    authority = Authority()
    tcp = transport == "tcp"
    files = credentials(folder, authority, authority.issue()) if tcp else None
    address = f"tcp://127.0.0.1:{free_port()}" if tcp else f"unix:{folder / 'w.sock'}"
    config = EngineConfig(
        model=str(DEMO), address=address, tls=files, worker_id="w", epoch=3, threads=1, client_timeout_s=1.0
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "engine"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    reports = iter(lambda: json.loads(process.stdout.readline()), None)
    states = {report["state"] for report in takewhile(lambda report: report["state"] != "ready", reports)}
    assert states == {"loading"}
    process.address, process.files = address, files
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(params=["unix", "tcp"])
def worker(tmp_path, request):
    """A worker that the test may end."""
    with started(request.param, tmp_path) as process:
        yield process


@pytest.fixture(scope="module", params=["unix", "tcp"])
def lasting(tmp_path_factory, request):
    """A worker that must outlast what the tests do to it."""
    with started(request.param, tmp_path_factory.mktemp("worker")) as process:
        yield process
        assert process.poll() is None


def stranger(worker, receive_bytes: int | None = None) -> socket.socket:
    """A connection that has said nothing yet."""
    address = parse(worker.address)
    tcp = isinstance(address, TcpAddress)
    made = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
    made.settimeout(60)
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((address.host, address.port) if tcp else address.path)
    if not tcp:
        return made
    return worker.files.client_context(Channel.REQUESTS).wrap_socket(made, server_hostname=address.host)


async def connect(worker) -> EngineClient:
    client = EngineClient(worker.address, "w", 3, credentials=worker.files)
    await client.connect()
    return client


async def collect(client, prompt, **params):
    outputs = client.generate(prompt, SamplingParams(**{"max_tokens": 8, **GREEDY, **params}))
    return [token async for output in outputs for token in output.token_ids]


async def test_many_clients_at_once(lasting):
    clients = [await connect(lasting) for _ in range(3)]
    alone = await collect(clients[0], [1, 2, 3])
    together = await asyncio.gather(*(collect(c, [1, 2, 3]) for c in clients for _ in range(5)))
    assert all(tokens == alone for tokens in together)
    assert clients[0].stats.blocks_total > 0
    for client in clients:
        await client.close()


async def test_a_stale_epoch_is_refused(lasting):
    for worker_id, epoch in (("w", 2), ("other", 3)):
        opened = os.listdir("/proc/self/fd")
        with pytest.raises(EngineDead, match="protocol, worker, epoch"):
            await EngineClient(lasting.address, worker_id, epoch, credentials=lasting.files).connect()
        assert os.listdir("/proc/self/fd") == opened


async def test_another_version_of_the_protocol_is_refused_on_both_sides(lasting, monkeypatch):
    """Whatever else such a greeting holds, and whatever the worker says besides its version."""
    with stranger(lasting) as other:
        other.sendall(frame_of(["Hello", PROTOCOL_VERSION + 1, {"another": "greeting"}]))
        body = FrameBuffer().feed(other.recv(1000))[0]
        assert msgspec.msgpack.decode(body)[:2] == ["Refused", PROTOCOL_VERSION]
        assert other.recv(100) == b""
    for module in (client_module, greeting):
        monkeypatch.setattr(module, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with pytest.raises(EngineDead, match=f"speaks version {PROTOCOL_VERSION} of the protocol"):
        await EngineClient(lasting.address, "w", 3, credentials=lasting.files).connect()


def frame_of(elements: list) -> bytes:
    body = msgspec.msgpack.encode(elements)
    return struct.pack("<I", len(body)) + body


async def test_leaving_a_stream_aborts_it(lasting):
    client = await connect(lasting)
    async with aclosing(client.generate([1, 2], SamplingParams(max_tokens=2000, **GREEDY))) as outputs:
        async for _ in outputs:
            break
    assert client.inflight == 0
    await eventually(lambda: (client.stats.running, client.stats.blocks_used) == (0, 0))
    await client.close()


async def test_a_client_that_never_reads_is_dropped_and_disturbs_nobody(lasting):
    deaf = stranger(lasting, receive_bytes=1024)
    deaf.sendall(frame(Hello(PROTOCOL_VERSION, "w", 3)))
    for i in range(8):
        params = SamplingParams(max_tokens=1500, logprobs=200, **GREEDY)
        deaf.sendall(frame(Submit(i, [1, 2, 3, i], params)))
    client = await connect(lasting)
    assert len(await collect(client, [4, 5, 6], max_tokens=30)) == 30
    await eventually(lambda: client.stats.running == 0)
    deaf.close()
    await client.close()


HELLO = frame(Hello(PROTOCOL_VERSION, "w", 3))
CUT = [b"GET / HTTP/1.1\r\n\r\n", HELLO[:7], HELLO + frame(Submit(1, [1, 2], SamplingParams(max_tokens=1)))[:9]]
GARBAGE = [
    *CUT,
    struct.pack("<I", 5) + b"\xff" * 5,
    b"\xff" * 64,
    struct.pack("<I", MAX_GREETING_BYTES + 1),
    HELLO + struct.pack("<I", MAX_FRAME_BYTES + 1),
]


async def test_garbage_is_dropped(lasting):
    """Noise, frames over the limit, and frames that are cut: the connection ends, never the worker."""
    for garbage in GARBAGE:
        with stranger(lasting) as other:
            other.sendall(garbage)
            if garbage in CUT:
                other.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while other.recv(1000):
                    pass
    client = await connect(lasting)
    assert len(await collect(client, [1])) == 8
    await client.close()


async def test_the_socket_is_private(lasting):
    address = parse(lasting.address)
    if isinstance(address, TcpAddress):
        pytest.skip("its privacy is in tests/engine/test_network.py")
    assert os.stat(address.path).st_mode & 0o077 == 0


async def test_drain_finishes_what_runs(worker):
    client = await connect(worker)
    running = asyncio.create_task(collect(client, [1, 2, 3], max_tokens=150))
    await eventually(lambda: client.stats.running == 1)
    worker.send_signal(signal.SIGTERM)
    assert len(await running) == 150
    wait_until(lambda: worker.poll() == 0)
    await client.close()


async def test_a_second_signal_hands_over_what_runs(worker):
    """Running and waiting requests of two clients end as moved, and go on from their last token."""
    clients = [await connect(worker), await connect(worker)]
    whole = await collect(clients[0], [1, 2, 3], max_tokens=1900)

    async def cut(client, count):
        tokens, end = [], None
        async for output in client.generate([1, 2, 3], SamplingParams(max_tokens=1900, **GREEDY)):
            tokens += output.token_ids
            end = output.finish_reason
            if len(tokens) > count:
                begun.release()
        return tokens, end

    begun = asyncio.Semaphore(0)
    running = [asyncio.create_task(cut(client, 20)) for client in clients * 2]
    for _ in running:
        await begun.acquire()
    worker.send_signal(signal.SIGTERM)
    while not clients[0].draining:  # a refusal says so before the next heartbeat
        await collect(clients[0], [4], max_tokens=1)
    worker.send_signal(signal.SIGTERM)
    for tokens, end in await asyncio.gather(*running):
        assert end == "moved"
        assert tokens == whole[: len(tokens)]
        assert 20 < len(tokens) < 1900
    wait_until(lambda: worker.poll() == 0)
    for client in clients:
        await eventually(lambda client=client: client.failure is not None)
        await client.close()


async def test_death_is_noticed_at_once(worker):
    client = await connect(worker)
    running = asyncio.create_task(collect(client, [1, 2, 3], max_tokens=1500))
    await eventually(lambda: client.stats.running == 1)
    worker.kill()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(running, 30)
    assert not client.usable
    await client.close()


def test_the_worker_goes_with_its_launcher(worker):
    worker.stdin.close()
    wait_until(lambda: worker.poll() == 0)


def test_frames_in_any_pieces():
    messages = [frame(Hello(1, "x" * n, n)) for n in (0, 3, 300)]
    data, buffer = b"".join(messages), FrameBuffer()
    bodies = [body for i in range(len(data)) for body in buffer.feed(data[i : i + 1])]
    assert [msgspec.msgpack.decode(b)[3] for b in bodies] == [0, 3, 300]
    with pytest.raises(ProtocolError, match="over the limit"):
        FrameBuffer().feed(b"\xff\xff\xff\xff")


async def test_a_worker_without_descriptors_serves_who_is_there(worker):
    """Others are let in when there are descriptors again."""
    client = await connect(worker)
    whole = await collect(client, [1, 2, 3])
    _, hard = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    opened = psutil.Process(worker.pid).num_fds()
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (opened, hard))
    late = asyncio.create_task(connect(worker))
    for _ in range(5):
        assert await collect(client, [1, 2, 3]) == whole
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (hard, hard))
    other = await late
    assert await collect(other, [1, 2, 3]) == whole
    assert worker.poll() is None
    for each in (client, other):
        await each.close()
