"""What a worker's socket loop does between two steps: a step may take a second, so nobody should wait for more than one."""

from __future__ import annotations

import socket
import threading

from engine.config import EngineConfig
from engine.messages import PROTOCOL_VERSION, Hello, Submit, frame
from engine.sampling.params import SamplingParams
from engine.server import EngineServer
from tests.engine.network import Endless
from tests.waiting import wait_until

CLIENTS = 12


class Paused(Endless):
    """Its steps end when they are told to."""

    def __init__(self):
        super().__init__()
        self.steps, self.go_on = 0, threading.Semaphore(0)

    def step(self):
        self.steps += 1
        self.go_on.acquire()
        return super().step()


def knock(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    client.sendall(frame(Hello(PROTOCOL_VERSION, "w", 3)))
    return client


def test_all_who_knock_during_a_step_are_greeted_before_the_next(tmp_path):
    core, path = Paused(), str(tmp_path / "worker")
    server = EngineServer(core, EngineConfig(model="x", address=f"unix:{path}", worker_id="w", epoch=3))
    loop = threading.Thread(target=server.run)
    loop.start()
    clients = [knock(path)]
    try:
        clients[0].sendall(frame(Submit(1, [5], SamplingParams(max_tokens=100))))
        wait_until(lambda: core.steps == 1)
        clients += [knock(path) for _ in range(CLIENTS)]
        core.go_on.release()
        wait_until(lambda: core.steps == 2)
        for client in clients:
            client.setblocking(False)
            assert client.recv(4096), "the worker hung up"
    finally:
        server.stopping = True
        core.go_on.release(100)
        loop.join()
        for client in clients:
            client.close()
