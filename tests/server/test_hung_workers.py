"""A worker that stands still: nobody waits for its end."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest

from engine.client import EngineClient, EngineDead, _Collector
from engine.messages import RequestOutput
from inference.errors import Unavailable
from inference.workers.target import Target
from tests.live import LiveServer, wait_until

ASK = {"prompt": "Hi", "max_tokens": 2}


def test_requests_for_a_hung_worker_are_refused_at_once(tmp_path):
    server = LiveServer(tmp_path / "var").start()
    try:
        assert server.post("/v1/completions", ASK).status_code == 200
        worker = server.workers()[0]
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: not server.healthy(), 30)
        answer = server.post("/v1/completions", ASK)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after-ms"]) == 1000 * int(answer.headers["retry-after"])
        assert worker.is_running()  # it was not waited for
        worker.send_signal(signal.SIGCONT)
        wait_until(server.healthy, 60)
        assert server.post("/v1/completions", ASK).status_code == 200
    finally:
        assert server.stop() == 0


@dataclass
class Client:
    suspect: bool = False
    inflight: int = 0
    usable: bool = True
    released: list[str] = field(default_factory=list)

    def release_waiting(self):
        self.released.append("all")


def target_of(*clients):
    return Target(None, None, None, dict(enumerate(clients)))


def test_a_silent_worker_is_not_picked_and_its_queue_goes_to_another():
    silent, well = Client(suspect=True), Client(inflight=9)
    target = target_of(silent, well)
    assert target.pick() is well
    target.relieve()
    assert (silent.released, well.released) == (["all"], [])


def test_without_another_worker_requests_stay_and_new_ones_are_refused():
    silent = Client(suspect=True)
    target = target_of(silent)
    target.relieve()
    assert silent.released == []
    with pytest.raises(Unavailable):
        target.pick()


async def test_only_requests_that_have_brought_nothing_are_given_up():
    client = EngineClient("/nowhere", "demo/0", 1)
    waiting, begun = _Collector(), _Collector()
    begun.put(RequestOutput(2, [1]))
    client._collectors = {1: waiting, 2: begun}
    client.release_waiting()
    assert (await begun.get()).token_ids == [1]
    assert begun.failure is None
    with pytest.raises(EngineDead):
        await waiting.get()
