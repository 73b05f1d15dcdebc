"""Measures prefill and decode apart: how fast blocks move, and what it does to the times of a mix of requests.

    python -m tools.bench.kv_transfer [--transport sockets nixl] [--model DIR] [--tokens 2048] [--rounds 5] [--streams 8] [--prompts 6]
        [--seconds 20]

1. The blocks of a prompt go from one KV cache to another, in one process, by each transport of `engine.kv_transfer`: digests, copies and all.
   The ratio is to a bare Unix socket that copies as many bytes; they take turns, and cells are medians.
2. Two worker processes serve running streams while long prompts arrive: first joined (each does both), then split (one prefills, one
   decodes). Cells: the long prompts' median time to the first token, and the streams' median, 99th percentile and longest time
   between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.kv_transfer.blocks import CacheBlocks
from engine.kv_transfer.handle import Identity, KvSource, new_transfer_id
from engine.kv_transfer.holds import Hold, Holds
from engine.kv_transfer.transport import Transport, Wanted
from engine.kv_transfer.transports import TRANSPORTS, transport_for
from engine.messages import FrameBuffer, to_worker
from engine.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
BLOCK_SIZE, VOCABULARY = 16, 1500
LAYERS, HEADS, WIDTH = 24, 8, 64
"""Of the caches of the first part: about a model of a billion parameters."""
CHUNK_BYTES = 1 << 20


def cache(num_blocks: int) -> Any:
    """A KV cache as the CPU backend lays it out, with random content."""
    shape = (num_blocks, HEADS, BLOCK_SIZE, WIDTH)
    keys, values = ([torch.rand(shape).bfloat16() for _ in range(LAYERS)] for _ in range(2))
    return SimpleNamespace(keys=keys, values=values, block_size=BLOCK_SIZE, dtype=torch.bfloat16)


class Into:
    """Writes what arrives into a cache, as an engine's loop does."""

    cancelled = False

    def __init__(self, blocks: CacheBlocks) -> None:
        self._blocks = blocks

    def take(self, first: int, count: int, data: Any) -> None:
        self._blocks.write(range(first, first + count), data, 0, count)


def transferred_s(
    transports: tuple[Transport, Transport], sender: CacheBlocks, receiver: CacheBlocks, num_blocks: int, folder: Path
) -> float:
    """Seconds in which the blocks get from one cache to the other, with a sender's transport and a receiver's."""
    path = folder / new_transfer_id()[:8]
    identity = Identity("m", sender.dtype, sender.layout, "", "", "")
    source = KvSource(f"unix:{path}", "w", 1, new_transfer_id(), num_blocks * BLOCK_SIZE, BLOCK_SIZE)
    holds = Holds(None)  # type: ignore[arg-type]  # nothing is given back here
    hold = Hold(source, identity, sender)
    hold.keep(SimpleNamespace(block_table=list(range(num_blocks))))  # type: ignore[arg-type]
    holds.add(hold)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            (body,) = FrameBuffer().feed(connection.recv(4096))
            transports[0].serve(connection, to_worker.decode(body), holds, sender.block_bytes)  # type: ignore[arg-type]

        thread = threading.Thread(target=serve)
        thread.start()
        begin = time.perf_counter()
        wanted = Wanted(identity, source.num_tokens, 0, num_blocks, sender.block_bytes)
        transports[1].fetch(source, wanted, Into(receiver))
        elapsed = time.perf_counter() - begin
        thread.join()
    return elapsed


def copied_s(count: int) -> float:
    """Seconds in which a bare socket copies so many bytes."""
    ours, theirs = socket.socketpair()
    data, into = memoryview(bytearray(count)), memoryview(bytearray(count))

    def send() -> None:
        for start in range(0, count, CHUNK_BYTES):
            ours.sendall(data[start : start + CHUNK_BYTES])

    with ours, theirs:
        thread = threading.Thread(target=send)
        begin = time.perf_counter()
        thread.start()
        while into:
            into = into[theirs.recv_into(into) :]
        thread.join()
        return time.perf_counter() - begin


def compare_rates(names: list[str], tokens: int, rounds: int, folder: Path) -> None:
    """Print the first part."""
    num_blocks = -(-tokens // BLOCK_SIZE)
    sender, receiver = CacheBlocks(cache(num_blocks)), CacheBlocks(cache(num_blocks))
    size = num_blocks * sender.block_bytes
    pairs = []
    for name in names:
        config = EngineConfig(model="m", kv_transport=name)  # type: ignore[arg-type]  # argparse checks it
        pairs.append((transport_for(config), transport_for(config)))
    times: list[list[float]] = []
    for _ in range(rounds + 1):
        ours = [transferred_s(pair, sender, receiver, num_blocks, folder) for pair in pairs]
        times.append([*ours, copied_s(size)])
    *rates, bare = (size / statistics.median(part) / 1e9 for part in zip(*times[1:], strict=True))
    for name, rate in zip(names, rates, strict=True):
        print(
            f"{tokens} tokens, {size / 1e6:.0f} MB: {name} {rate:.2f} GB/s, bare socket {bare:.2f} GB/s, ratio {rate / bare:.2f}"
        )


class Worker:
    """A worker process."""

    def __init__(self, model: str, folder: Path, name: str, **options: Any) -> None:
        self._name, self.address = name, f"unix:{folder / name}"
        config = EngineConfig(model=model, address=self.address, worker_id=name, epoch=1, threads=1, **options)
        command = [sys.executable, "-m", "engine"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        self._process.stdin.flush()

    async def connect(self) -> EngineClient:
        """A connection, once the worker is ready; what it reports later is read too."""
        assert self._process.stdout is not None
        while json.loads(self._process.stdout.readline())["state"] != "ready":
            pass
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        client = EngineClient(self.address, self._name, 1)
        await client.connect()
        return client

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


async def sequence(
    clients: tuple[EngineClient, EngineClient], prompt: list[int], length: int, salt: str
) -> list[float]:
    """The times of one sequence's tokens; its prompt is computed by the first client's worker."""
    first, second = clients
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    times, tokens, source = [], [], None
    hold = "" if first is second else new_transfer_id()
    begin = time.perf_counter()
    async with aclosing(first.generate(prompt, params, hold=hold, cache_salt=salt)) as outputs:
        async for output in outputs:
            tokens += output.token_ids
            times += [time.perf_counter() - begin] * len(output.token_ids)
            source = output.source
    if source is not None:
        rest = second.generate(prompt, params, generated=tokens, source=source, cache_salt=salt)
        async with aclosing(rest) as outputs:
            async for output in outputs:
                times += [time.perf_counter() - begin] * len(output.token_ids)
    return times


async def mix(clients: list[EngineClient], split: bool, asked: argparse.Namespace) -> tuple[list[float], list[float]]:
    """First-token times of the long prompts, and times between the tokens of the streams, in seconds."""
    rng = random.Random(1)
    longest = clients[0].model.max_model_len
    until = time.perf_counter() + asked.seconds
    gaps: list[float] = []
    firsts: list[float] = []

    def pair(number: int) -> tuple[EngineClient, EngineClient]:
        return (clients[0], clients[1]) if split else (clients[number % 2],) * 2

    async def stream(number: int) -> None:
        while time.perf_counter() < until:
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(32)]
            times = await sequence(pair(number), prompt, min(200, longest // 2), f"s{number}{split}")
            gaps.extend(later - earlier for earlier, later in pairwise(times))

    async def prompts(number: int) -> None:
        while time.perf_counter() < until:
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(min(asked.tokens, longest - 20))]
            firsts.append((await sequence(pair(number), prompt, 8, f"p{number}{split}"))[0])
            await asyncio.sleep(rng.random())

    await asyncio.gather(*(stream(n) for n in range(asked.streams)), *(prompts(n) for n in range(asked.prompts)))
    return firsts, gaps


async def compare_times(asked: argparse.Namespace, transport: str, folder: Path) -> None:
    """Print the second part."""
    workers = [Worker(asked.model, folder, name, kv_transport=transport) for name in ("a", "b")]
    try:
        clients = [await worker.connect() for worker in workers]
        for split in (False, True) if transport == asked.transport[0] else (True,):
            firsts, gaps = await mix(clients, split, asked)
            last = statistics.quantiles(gaps, n=100)[-1]
            print(
                f"{f'split by {transport}' if split else 'joined'}: TTFT {statistics.median(firsts) * 1e3:.0f} ms of {len(firsts)} prompts; between tokens "
                f"{statistics.median(gaps) * 1e3:.1f} ms, p99 {last * 1e3:.1f} ms, longest {max(gaps) * 1e3:.0f} ms of {len(gaps)}"
            )
        for client in clients:
            await client.close()
    finally:
        for worker in workers:
            worker.end()


def main() -> None:
    """Measure both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=["sockets"])
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dragoman-kv-") as folder:
        compare_rates(asked.transport, asked.tokens, asked.rounds, Path(folder))
        for transport in asked.transport:
            asyncio.run(compare_times(asked, transport, Path(folder)))


if __name__ == "__main__":
    main()
