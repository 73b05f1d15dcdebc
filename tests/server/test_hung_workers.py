"""A worker that stands still: nobody waits for its end."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field

import pytest

from engine.client import EngineClient, EngineDead, _Collector
from engine.messages import ModelInfo, RequestOutput, Stats, Submit
from engine.sampling.params import SamplingParams
from inference.workers.routing.balancer import Balancer
from inference.workers.routing.demand import Demand
from inference.workers.routing.retry_budget import RetryBudget
from inference.workers.target import Target
from management.snapshot import WorkerEntry
from tests.live import LiveServer, wait_until
from tests.unit.scripts import model_info

ASK = {"prompt": "Hi", "max_tokens": 2}


def test_requests_for_a_hung_worker_are_refused_at_once(tmp_path):
    server = LiveServer(tmp_path / "var", environment={"DRAGOMAN_HOLD_S": "0"}).start()
    try:
        assert server.post("/v1/completions", ASK).status_code == 200
        worker = server.workers()[0]
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: not server.healthy())
        answer = server.post("/v1/completions", ASK)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after-ms"]) == 1000 * int(answer.headers["retry-after"])
        assert worker.is_running()  # it was not waited for
        worker.send_signal(signal.SIGCONT)
        wait_until(server.healthy)
        assert server.post("/v1/completions", ASK).status_code == 200
    finally:
        assert server.stop() == 0


@dataclass(eq=False)
class Client:
    suspect: bool = False
    usable: bool = True
    model: ModelInfo = field(default_factory=model_info)
    stats: Stats = field(default_factory=Stats)
    released: list[str] = field(default_factory=list)

    def release_waiting(self):
        self.released.append("all")


def target_of(*clients):
    known = {WorkerEntry(f"demo/{number}", 1, ""): client for number, client in enumerate(clients)}
    balancer = Balancer(time.monotonic, random.Random(0))
    return Target(None, None, None, balancer, RetryBudget(time.monotonic), known)


def test_a_silent_worker_is_not_picked_and_its_queue_goes_to_another():
    silent, well = Client(suspect=True), Client()
    target = target_of(silent, well)
    assert target.assign(Demand([1], 1)).client is well
    target.relieve()
    assert (silent.released, well.released) == (["all"], [])


def test_without_another_worker_requests_stay_and_new_ones_are_refused():
    silent = Client(suspect=True)
    target = target_of(silent)
    target.relieve()
    assert silent.released == []
    assert target.assign(Demand([1], 1)) is None


async def test_only_requests_that_have_brought_nothing_are_given_up():
    client = EngineClient("/nowhere", "demo/0", 1)
    waiting, begun = (_Collector(Submit(number, [1], SamplingParams(max_tokens=1))) for number in (1, 2))
    begun.put(RequestOutput(2, [1]))
    client._collectors = {1: waiting, 2: begun}
    client.release_waiting()
    assert (await begun.get()).token_ids == [1]
    assert begun.failure is None
    with pytest.raises(EngineDead):
        await waiting.get()
