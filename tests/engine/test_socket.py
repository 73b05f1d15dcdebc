"""A worker process on its socket: greeting, streams, slow clients, garbage, drain, the lifeline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import aclosing
from itertools import takewhile

import msgspec
import pytest

from engine.client import EngineClient, EngineDead
from engine.config import EngineConfig
from engine.messages import PROTOCOL_VERSION, FrameBuffer, Hello, ProtocolError, frame
from engine.sampling.params import SamplingParams
from tests.conftest import DEMO, ROOT
from tests.waiting import eventually, wait_until

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def worker(tmp_path):
    path = str(tmp_path / "w.sock")
    config = EngineConfig(
        model=str(DEMO), address=f"unix:{path}", worker_id="w", epoch=3, threads=1, client_timeout_s=1.0
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "engine"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    reports = iter(lambda: json.loads(process.stdout.readline()), None)
    states = {report["state"] for report in takewhile(lambda report: report["state"] != "ready", reports)}
    assert states == {"loading"}
    process.socket_path = path
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


async def connect(worker) -> EngineClient:
    client = EngineClient(f"unix:{worker.socket_path}", "w", 3)
    await client.connect()
    return client


async def collect(client, prompt, **params):
    outputs = client.generate(prompt, SamplingParams(**{"max_tokens": 8, **GREEDY, **params}))
    return [token async for output in outputs for token in output.token_ids]


async def test_many_clients_at_once(worker):
    clients = [await connect(worker) for _ in range(3)]
    alone = await collect(clients[0], [1, 2, 3])
    together = await asyncio.gather(*(collect(c, [1, 2, 3]) for c in clients for _ in range(5)))
    assert all(tokens == alone for tokens in together)
    assert clients[0].stats.blocks_total > 0
    for client in clients:
        await client.close()


async def test_a_stale_epoch_is_refused(worker):
    for worker_id, epoch in (("w", 2), ("other", 3)):
        with pytest.raises(EngineDead, match="protocol, worker, epoch"):
            await EngineClient(f"unix:{worker.socket_path}", worker_id, epoch).connect()


async def test_leaving_a_stream_aborts_it(worker):
    client = await connect(worker)
    async with aclosing(client.generate([1, 2], SamplingParams(max_tokens=2000, **GREEDY))) as outputs:
        async for _ in outputs:
            break
    assert client.inflight == 0
    await eventually(lambda: (client.stats.running, client.stats.blocks_used) == (0, 0))
    await client.close()


async def test_a_client_that_never_reads_is_dropped_and_disturbs_nobody(worker):
    deaf = socket.socket(socket.AF_UNIX)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    deaf.connect(worker.socket_path)
    deaf.sendall(frame(Hello(PROTOCOL_VERSION, "w", 3)))
    from engine.messages import Submit

    for i in range(8):
        params = SamplingParams(max_tokens=1500, logprobs=200, **GREEDY)
        deaf.sendall(frame(Submit(i, [1, 2, 3, i], params)))
    client = await connect(worker)
    assert len(await collect(client, [4, 5, 6], max_tokens=30)) == 30
    await eventually(lambda: client.stats.running == 0, 20)
    deaf.close()
    await client.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 5) + b"\xff" * 5, b"\xff" * 64])
async def test_garbage_is_dropped(worker, garbage):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(worker.socket_path)
        stranger.settimeout(5)
        stranger.sendall(garbage)
        if garbage[:4] != b"GET ":
            assert stranger.recv(100) == b""
    client = await connect(worker)
    assert len(await collect(client, [1])) == 8
    await client.close()


async def test_the_socket_is_private(worker):
    assert os.stat(worker.socket_path).st_mode & 0o077 == 0


async def test_drain_finishes_what_runs(worker):
    client = await connect(worker)
    running = asyncio.create_task(collect(client, [1, 2, 3], max_tokens=150))
    await eventually(lambda: client.stats.running == 1)
    worker.send_signal(signal.SIGTERM)
    assert len(await running) == 150
    wait_until(lambda: worker.poll() == 0, 5)
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
    wait_until(lambda: worker.poll() == 0, 5)
    for client in clients:
        await eventually(lambda client=client: client.failure is not None)
        await client.close()


async def test_death_is_noticed_at_once(worker):
    client = await connect(worker)
    running = asyncio.create_task(collect(client, [1, 2, 3], max_tokens=1500))
    await eventually(lambda: client.stats.running == 1)
    worker.kill()
    with pytest.raises(EngineDead):
        await asyncio.wait_for(running, 2)
    assert not client.usable
    await client.close()


def test_the_worker_goes_with_its_launcher(worker):
    worker.stdin.close()
    wait_until(lambda: worker.poll() == 0, 5)


def test_frames_in_any_pieces():
    messages = [frame(Hello(1, "x" * n, n)) for n in (0, 3, 300)]
    data, buffer = b"".join(messages), FrameBuffer()
    bodies = [body for i in range(len(data)) for body in buffer.feed(data[i : i + 1])]
    assert [msgspec.msgpack.decode(b)[3] for b in bodies] == [0, 3, 300]
    with pytest.raises(ProtocolError, match="over the limit"):
        FrameBuffer().feed(b"\xff\xff\xff\xff")
