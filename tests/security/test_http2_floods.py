"""Floods of HTTP/2 frames against the gRPC services: a neighbour's calls are answered meanwhile, and nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc
import psutil
import pytest

from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from tests.live import LiveServer
from tests.security.http2 import RudeClient
from tests.server.test_grpc_limits import asking, places_taken, unary
from tests.waiting import wait_until

FLOOD_S = 4.0
MOST_GROWN_BYTES = 60 << 20
"""Of a neighbour's call while both cores are busy with the flood's two ends."""
FLOODS: dict[str, Callable[[RudeClient], None]] = {
    "resets": lambda client: client.reset(200),
    "pings": lambda client: client.ping(500),
    "settings": lambda client: client.settings(500),
    "headers without end": lambda client: client.continuations(20),
    "headers that grow": lambda client: client.big_headers(10),
    "calls that stand still": lambda client: client.open_streams(50),
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    server = LiveServer(tmp_path_factory.mktemp("floods") / "var").start()
    yield server
    assert server.stop() == 0, server.log


class Flood:
    """Connections that flood until they are told to stop; whoever is hung up on comes again."""

    def __init__(self, port: int, act: Callable[[RudeClient], None], threads: int = 2) -> None:
        self.hung_up = self.rounds = self.connected = 0
        self._port, self._act, self._end = port, act, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def _run(self) -> None:
        while not self._end.is_set():
            client = None
            try:
                client = RudeClient(self._port)
                self.connected += 1
                while not self._end.is_set():
                    self._act(client)
                    self.rounds += 1
            except OSError:
                self.hung_up += 1
            finally:
                if client is not None:
                    client.close()

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_stops_nobody(live, name):
    """What malloc keeps of a flood it keeps once; what leaks, leaks with each."""
    grown = [grown_by(live, name)]
    while grown[-1] > MOST_GROWN_BYTES and len(grown) < 5:
        grown.append(grown_by(live, name))
    assert grown[-1] <= MOST_GROWN_BYTES, grown


def grown_by(live: LiveServer, name: str) -> int:
    """Bytes by which the server has grown with a flood, beside which it answers others."""
    process = psutil.Process(live.process.pid)
    before, slowest, calls = process.memory_info().rss, 0.0, 0
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc_port}") as channel:
        ask = unary(channel, "ServerLive", pb.ServerLiveResponse)
        assert ask(pb.ServerLiveRequest(), timeout=60).live
        used = process.cpu_times()
        with Flood(live.grpc_port, FLOODS[name]) as flood:
            until = time.monotonic() + FLOOD_S
            while time.monotonic() < until:
                begin = time.monotonic()
                assert ask(pb.ServerLiveRequest(), timeout=60).live
                assert live.get("/ping").status_code == 200
                slowest, calls = max(slowest, time.monotonic() - begin), calls + 1
        now = process.cpu_times()
        answer = unary(channel, "ModelInfer")(asking(stream=False, max_tokens=2), timeout=60)
        assert answer.outputs[0].name == "text_output"
    print(
        f"\n{name}: {flood.rounds} rounds, hung up on {flood.hung_up} times; a neighbour's slowest of {calls} calls "
        f"{slowest * 1000:.0f} ms; {now.user + now.system - used.user - used.system:.1f} s of CPU in {FLOOD_S:.0f} s"
    )
    assert flood.connected
    assert flood.rounds + flood.hung_up > 0
    wait_until(lambda: places_taken(live) == 0)
    live.wait_idle()
    return process.memory_info().rss - before


BOMB_BYTES = 256 << 20


def test_a_message_that_decompresses_to_megabytes_is_not_blown_up(live):
    """gRPC's own compression: the bytes on the wire are few, and the limit holds for what they stand for."""
    process = psutil.Process(live.process.pid)
    before = process.memory_info().rss
    peak, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with grpc.insecure_channel(
            f"127.0.0.1:{live.grpc_port}", options=[("grpc.max_send_message_length", -1)]
        ) as channel:
            for method in ("ModelInfer", "ModelMetadata"):
                call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
                with pytest.raises(grpc.RpcError) as refused:
                    call(bytes(BOMB_BYTES), timeout=300, compression=grpc.Compression.Gzip)
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, refused.value.details()
    finally:
        ended.set()
        watcher.join()
    print(f"\na bomb for {BOMB_BYTES >> 20} MiB: memory grew by {(peak[0] - before) >> 20} MiB at most")
    assert peak[0] - before < BOMB_BYTES // 2
    assert live.healthy()


def test_a_compressed_message_within_the_limit_is_read(live):
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc_port}", compression=grpc.Compression.Gzip) as channel:
        answer = unary(channel, "ModelInfer")(asking(stream=False, max_tokens=2), timeout=60)
        assert answer.outputs[0].name == "text_output"
