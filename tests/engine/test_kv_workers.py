"""Two worker processes: one computes prompts, the other goes on with their sequences."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import msgspec
import pytest

from engine.address import parse
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.failures import FinishReason
from engine.kv_transfer.handle import Identity, new_transfer_id
from engine.kv_transfer.messages import Pull
from engine.messages import PROTOCOL_VERSION, Refused, frame
from engine.network.credentials import Credentials
from engine.sampling.params import SamplingParams
from tests.certificates import Authority, credentials
from tests.conftest import DEMO, ROOT
from tests.engine.engines import prompts
from tests.engine.pairs import transport
from tests.live import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.full

__all__ = ["transport"]

PROMPT = prompts(1700, (300,), seed=9)[0]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True, logprobs=2)


class Worker:
    """A process, and where it listens."""

    def __init__(self, name: str, address: str, files: Credentials | None, transport: str) -> None:
        self.name, self.address, self.files = name, address, files
        options = {"kv_transport": transport, "nixl_devices": "lo" if files else ""}
        config = EngineConfig(
            model=str(DEMO),
            address=address,
            tls=files,
            worker_id=name,
            epoch=2,
            threads=1,
            max_num_batched_tokens=64,
            **options,
        )
        command = [sys.executable, "-m", "engine"]
        environment = {
            **os.environ,
            "UCX_TLS": "tcp",
        }  # where a device is named; UCX would find that both are on one host
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, env=environment)
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()

    def wait(self) -> Worker:
        while json.loads(self.process.stdout.readline())["state"] != "ready":
            pass
        return self

    async def connect(self) -> EngineClient:
        client = EngineClient(self.address, self.name, 2, credentials=self.files)
        await client.connect()
        return client

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=["unix", "tcp"])
def workers(request, tmp_path, transport):
    files = None
    if request.param == "tcp":
        authority = Authority("cluster")
        files = credentials(tmp_path, authority, authority.issue())
    where = {name: f"tcp://127.0.0.1:{free_port()}" if files else f"unix:{tmp_path / name}" for name in "pd"}
    made = [Worker(name, where[name], files, transport) for name in "pd"]
    yield [worker.wait() for worker in made]
    for worker in made:
        worker.end()


async def collect(client: EngineClient, **more: object):
    """All tokens with their log-probabilities, and the last output."""
    said = []
    async with aclosing(client.generate(PROMPT, PARAMS, **more)) as outputs:
        async for output in outputs:
            said += [(entry.token_id, entry.logprob) for entry in output.logprobs or []]
    return said, output


async def test_two_processes(workers):
    prefill, decode = [await worker.connect() for worker in workers]
    alone, _ = await collect(prefill, cache_salt="alone")

    async def both(salt: str):
        first, end = await collect(prefill, cache_salt=salt, hold=new_transfer_id())
        assert end.finish_reason is FinishReason.MOVED
        assert not prefill.draining
        rest, _ = await collect(decode, cache_salt=salt, generated=[first[0][0]], source=end.source)
        return first + rest

    assert await asyncio.gather(*(both(str(i)) for i in range(6))) == [alone] * 6
    assert decode.stats.prompt_tokens == 0
    assert decode.stats.kv.fetched_blocks == 6 * 19
    assert not decode.stats.kv.failures
    await eventually(lambda: prefill.stats.kv.held_blocks == 0)
    await eventually(lambda: prefill.stats.blocks_used == 0)

    first, end = await collect(prefill, cache_salt="released", hold=new_transfer_id())
    await eventually(lambda: prefill.stats.kv.held_blocks == 19)
    prefill.release(end.source.transfer_id)
    await eventually(lambda: prefill.stats.kv.held_blocks == 0)

    _refused_strangers(workers[0])

    # A worker that drains waits for those who will fetch; one that is killed is not waited for.
    first, end = await collect(prefill, cache_salt="drained", hold=new_transfer_id())
    workers[0].process.send_signal(signal.SIGTERM)
    await eventually(lambda: prefill.draining)
    rest, _ = await collect(decode, cache_salt="drained", generated=[first[0][0]], source=end.source)
    assert first + rest == alone
    assert decode.stats.kv.fetched_blocks == 7 * 19
    await eventually(lambda: workers[0].process.poll() is not None)
    rest, _ = await collect(decode, cache_salt="gone", generated=[first[0][0]], source=end.source)
    assert first + rest == alone
    assert decode.stats.kv.failures == {"lost": 1}
    for client in (prefill, decode):
        await client.close()


def _refused_strangers(worker: Worker) -> None:
    """Who expects another worker or epoch, or speaks another version, gets no blocks."""
    identity = Identity("", "", "", "", "", "")
    for protocol, worker_id, epoch in ((PROTOCOL_VERSION, "p", 1), (PROTOCOL_VERSION, "q", 2), (1, "p", 2)):
        with parse(worker.address).dial(60, worker.files) as stranger:
            stranger.sendall(frame(Pull(protocol, worker_id, epoch, new_transfer_id(), identity, 1, 0)))
            answer = stranger.recv(1 << 12)
            refused = frame(Refused(PROTOCOL_VERSION, "p", 2))
            assert answer == (b"" if protocol == PROTOCOL_VERSION else refused)
